"""Habits of code that put bits at risk, found in the owner's files without running them: a table, and one loop.

A comment `# audit: fine, REASON` on a line silences what is found there.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .orders import listings, sets
from .syntax import Source

FINE = re.compile(r"#\s*audit:\s*fine,\s*\S")
LONGEST = 60  # characters of code that are told

SEEDING = {"seed", "manual_seed", "manual_seed_all", "seed_everything", "set_seed", "seed_all", "default_rng"}
SEEDING |= {"RandomState", "Random", "SeedSequence", "PCG64", "Philox", "derive"}
SEED = re.compile(r"(^|_)(seed|random_state|rng_state)s?($|_)", re.IGNORECASE)
# What is another number in each process, or at each time.
PASSING = ("time.", "datetime.", "uuid.", "os.urandom", "os.getpid", "os.getrandom", "secrets.", "builtins.id",
           "builtins.hash", "socket.gethostname", "platform.node", "threading.get_ident")  # fmt: skip
# Generators and seeds that the system's entropy decides if they are given nothing.
UNSEEDED = {
    "torch.seed", "torch.random.seed", "torch.cuda.seed", "torch.cuda.seed_all", "torch.Generator.seed", "random.seed",
    "random.Random", "numpy.random.default_rng", "numpy.random.RandomState", "numpy.random.seed",
    "numpy.random.SeedSequence", "numpy.random.PCG64", "numpy.random.Philox", "numpy.random.MT19937",
}  # fmt: skip
ENTROPY = ("os.urandom", "os.getrandom", "secrets.", "random.SystemRandom")

NO_DRAWS = {"Random", "SystemRandom", "seed", "getstate", "setstate", "get_state", "set_state", "default_rng"}
NO_DRAWS |= {"RandomState", "Generator", "SeedSequence", "PCG64", "Philox", "MT19937", "BitGenerator"}
TORCH_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
TORCH_DRAWS |= {"rand_like", "randn_like", "randint_like"}
IN_PLACE = {"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"}
LAYERS = {"Linear", "Bilinear", "Embedding", "LSTM", "GRU", "RNN", "MultiheadAttention", "Conv1d", "Conv2d", "Conv3d"}

LOADERS = {"DataLoader", "DistributedSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"}
FLAGS = {
    "torch.use_deterministic_algorithms", "torch.set_deterministic_debug_mode", "torch.set_float32_matmul_precision",
    "torch.set_num_threads", "torch.set_num_interop_threads", "torch.set_flush_denormal",
}  # fmt: skip
SETTERS = re.compile(r"torch\.backends\.[\w.]*\.(set_flags|flags|enable_\w+|allow_\w+)$")
# Functions that the C library computes, or numpy by code for each CPU. Square roots, floors and the like are exact.
TRANSCENDENTAL = {"sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "exp", "exp2", "expm1",
                  "log", "log2", "log10", "log1p", "pow", "power", "cbrt", "arcsin", "arccos", "arctan"}  # fmt: skip
CLIPPING = "torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"
SPLITTING = {"torch.utils.data.random_split", "torch.randperm", "random.shuffle", "random.sample",
             "numpy.random.shuffle", "numpy.random.permutation",
             "sklearn.model_selection.train_test_split"}  # fmt: skip
SPLITS = {"load", "prepare"}  # the owner's functions that several stages call, or that write what all of them read
GENERATORS = {"generator", "random_state"}
THREADS = {"ThreadPoolExecutor", "ProcessPoolExecutor", "as_completed", "ThreadPool", "imap_unordered", "Thread"}


@dataclass(frozen=True)
class Rule:
    """A habit: its name, what finds it in a file, why it is one, and the remedy. A hint may be harmless."""

    name: str
    finds: Callable[[Source], Iterable[ast.expr]]
    why: str
    instead: str
    hint: bool = False


@dataclass(frozen=True)
class Finding:
    """What was found at a place, why it is a risk, and a way without it."""

    group: str
    file: str
    line: int
    name: str  # an operation, or code
    why: str
    instead: str = ""
    module: str = ""
    hint: bool = False
    silenced: bool = False

    def lines(self) -> Iterator[str]:
        """As a table has it."""
        where = f"{self.file}:{self.line}  " if self.line else ""
        module = f", in {self.module}" if self.module else ""
        yield f"  {where}{self.name}{module}"
        yield f"      {'hint: ' * self.hint}{self.why}{f'. Instead: {self.instead}' if self.instead else ''}"

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: value for name, value in vars(self).items() if name != "group"}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _called(call: ast.Call) -> str:
    """The last part of the name of what is called, imported or not."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _method(source: Source, call: ast.Call) -> str:
    """The full name of what is called; of a method, by the class of its object."""
    if name := source.dotted(call.func):
        return name
    kind = source.kind(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return f"{kind}.{_called(call)}" if kind else ""


def _given(call: ast.Call) -> bool:
    """Whether a call has an argument that is not None."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in values)


def _passing(source: Source, node: ast.AST) -> bool:
    """Whether a number in an expression is another one each time."""
    inside = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(_method(source, each).startswith(PASSING) for each in inside)


def unseeded(source: Source) -> Iterator[ast.expr]:
    """Seeds that are another number in each process, and generators without a seed."""
    for call in source.calls():
        name = _method(source, call)
        hashes = name == "builtins.hash" and not _in_hash(source, call)
        if hashes or name.startswith(ENTROPY) or (name in UNSEEDED and not _given(call)):
            yield call
            continue
        values = [*call.args, *(each.value for each in call.keywords)] if _called(call) in SEEDING else []
        values += [each.value for each in call.keywords if each.arg and SEED.search(each.arg)]
        if any(_passing(source, value) for value in values):
            yield call
    for node in ast.walk(source.tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [getattr(each, "id", getattr(each, "attr", "")) for each in targets]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) else None
        if value and any(SEED.search(name) for name in names) and _passing(source, value):
            yield value


def _in_hash(source: Source, node: ast.AST) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name == "__hash__" for each in source.above(node))


def draws(source: Source) -> Iterator[ast.expr]:
    """Random numbers that are drawn while the file is imported."""
    for call in source.calls():
        if not source.at_import(call) or any(each.arg == "generator" for each in call.keywords):
            continue
        name, last = _method(source, call), _called(call)
        library, _, rest = name.rpartition(".")
        if (
            (library in ("random", "numpy.random") and rest not in NO_DRAWS)
            or (library == "torch" and rest in TORCH_DRAWS)
            or name.startswith("torch.nn.init.")
            or (library in ("torch.nn", "torch.nn.modules") and rest in LAYERS)
            or (last in IN_PLACE and isinstance(call.func, ast.Attribute) and not library.startswith("("))
        ):
            yield call


def loaders(source: Source) -> Iterator[ast.expr]:
    """Loaders and samplers beside the run's."""
    for call in source.calls():
        name = source.dotted(call.func)
        if name.startswith("torch.utils.data.") and _last(name) in LOADERS:
            yield call


def flags(source: Source) -> Iterator[ast.expr]:
    """Settings that the table of flags sets, changed by the owner."""
    for call in source.calls():
        name = source.dotted(call.func)
        if name == "builtins.setattr" and call.args:
            name = f"{source.dotted(call.args[0])}.set_flags"
        if name in FLAGS or SETTERS.match(name):
            yield call
    for node in ast.walk(source.tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and source.dotted(node).startswith(("torch.backends.", "torch.utils.deterministic.")):
            yield node  # type: ignore[misc]  # `stored` says so


def warnings(source: Source) -> Iterator[ast.expr]:
    """`warn_only`, however it is said."""
    for call in source.calls():
        values = [each.value for each in call.keywords if each.arg == "warn_only"]
        if any(not (isinstance(value, ast.Constant) and value.value is False) for value in values):
            yield call


def threads(source: Source) -> Iterator[ast.expr]:
    """Work that ends in an order of its own."""
    for call in source.calls():
        name = _method(source, call)
        if _last(name) in THREADS and name.startswith(("concurrent.", "multiprocessing.", "threading.", "torch.")):
            yield call


def transcendental(source: Source) -> Iterator[ast.expr]:
    """Functions whose last bit another C library, or another CPU, rounds otherwise."""
    for call in source.calls():
        library, _, name = source.dotted(call.func).rpartition(".")
        if library in ("math", "cmath", "numpy") and name in TRANSCENDENTAL:
            yield call


def clipping(source: Source) -> Iterator[ast.expr]:
    """torch's own norm of the gradients."""
    return (call for call in source.calls() if source.dotted(call.func) in CLIPPING)


def splits(source: Source) -> Iterator[ast.expr]:
    """Shuffles and splits of a dataset by the global generators."""
    for call in source.calls():
        within = {getattr(each, "name", "") for each in source.above(call)}
        seeded = any(each.arg in GENERATORS for each in call.keywords)
        if _method(source, call) in SPLITTING and within & SPLITS and not seeded:
            yield call


def variables(source: Source) -> Iterator[ast.expr]:
    """Environment variables."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name) and source.dotted(node) in ("os.environ", "os.getenv"):
            yield node


def of_a_rank(source: Source) -> Iterator[ast.expr]:
    """What is added up, or collected, in the loop over a step's micro-batches."""
    loops = [node for node in ast.walk(source.tree) if isinstance(node, ast.For)]
    steps = {name for loop in loops if _calls(loop.iter, "steps") for name in _names(loop.target)}
    for loop in loops:
        inside = [node for part in loop.body for node in ast.walk(part)]
        assigned = [target for node in inside if isinstance(node, ast.Assign) for target in node.targets]
        own = set().union(*map(_names, [loop.target, *assigned]))
        for node in inside if _names(loop.iter) & steps else ():
            target: ast.expr | None = node.target if isinstance(node, ast.AugAssign) else None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                target = node.func.value
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name) and target.id not in own:
                yield target


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _calls(node: ast.AST, method: str) -> bool:
    return any(_called(each) == method for each in ast.walk(node) if isinstance(each, ast.Call))


RULES = (
    Rule("unsorted listing", listings, "the file system decides the order of a listing", "sorted(...)"),
    Rule(
        "order of a set", sets, "the order of a set follows hashes, and those of objects follow memory", "sorted(...)"
    ),
    Rule(
        "seed",
        unseeded,
        "it is another number in each process",
        "the global generators, which the run seeds, or config.seed",
    ),
    Rule("draw at import", draws, "it is drawn before the run seeds the generators", "draw in a function"),
    Rule(
        "own loader",
        loaders,
        "its order and its generators are not the run's, and no checkpoint holds them",
        "hand the dataset to run.steps(...), or to evaluating(...)",
    ),
    Rule("warn_only", warnings, "it keeps kernels that are not deterministic", "leave it to the run"),
    Rule(
        "flag",
        flags,
        "the run sets and records this flag when it begins, not what is set after",
        "leave it to the run, or name the flag in determinism.relax",
    ),
    Rule(
        "part of a rank",
        of_a_rank,
        "it holds what this rank's micro-batches give, not those of all",
        "step.loss, or samebits.sums(...)",
    ),
    Rule(
        "split",
        splits,
        "it follows what was drawn before it, which is not the same in each stage",
        "samebits.Permutation(n, key), or a generator with a seed",
    ),
    Rule("environment variable", variables, "no hash covers it", "a key of params.yaml"),
    Rule(
        "function of the C library",
        transcendental,
        "its last bit depends on the version of the C library, or on the CPU",
        "+ - x /, or samebits.cosine(step, steps)",
        hint=True,
    ),
    Rule(
        "norm of the gradients",
        clipping,
        "it takes no gradients that are sharded",
        "samebits.clip_grad_norm_(parameters, max_norm)",
        hint=True,
    ),
    Rule("threads", threads, "they end in any order", "take results in the order of their tasks", hint=True),
)


def found(source: Source) -> list[Finding]:
    """What the rules find in a file: first what counts, then what a comment silences, each by line."""
    met: dict[tuple[int, str], Finding] = {}
    for rule in RULES:
        for node in rule.finds(source):
            code = source.code(node)
            short = code if len(code) <= LONGEST else f"{code[: LONGEST - 1]}…"
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            fine = any(is_fine(source, line) for line in lines)
            finding = Finding(
                "Code", source.name, node.lineno, short, rule.why, rule.instead, hint=rule.hint, silenced=fine
            )
            met.setdefault((node.lineno, short), finding)
    return sorted(met.values(), key=lambda each: (each.silenced, each.line))


def is_fine(source: Source, line: int) -> bool:
    """Whether a comment on a line says, with a reason, that nothing is to be found there."""
    return bool(FINE.search(source.comments.get(line, "")))
