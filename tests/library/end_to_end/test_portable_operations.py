"""A run that calls an operation whose bits may depend on the CPU says so, by name, and is out of the portable class."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt import Crash, inside
from loops import Loop, Parts, each_step, good
from project.config import Config
from support import OURS as PROJECT
from support import TESTS, Trained
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from warm import Warm

from samebits.base.files import read_json
from samebits.base.project import Project
from samebits.config.settings import Determinism
from samebits.core import exact, flags
from samebits.core.errors import Preempted
from samebits.environment import environment, portable, watch
from samebits.record import names, opening, receipt
from samebits.record.classes import environments
from samebits.run import Run

THIS = Path(__file__).name
PLAIN = each_step(good)


class Calls(nn.Module):
    """Calls a function in its forward pass."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) to (n, 8), all positive."""
        return self.function(torch.sigmoid(x) + 0.5)


class Backwards(torch.autograd.Function):
    """The same; its backward pass calls atan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.atan(gradient)


@dataclass(frozen=True)
class Ended:
    """A run that ended: its folder and what it told."""

    out: Path
    message: list[str]

    @property
    def environment(self) -> dict[str, Any]:
        return read_json(self.out / names.ENVIRONMENT)

    @property
    def non_portable(self) -> list[str]:
        return self.environment["preimage"]["cpu"]["non_portable"]


Attempt = Callable[..., Ended]


@pytest.fixture(autouse=True)
def strict(as_a_stage: None) -> Iterator[None]:
    """What a run relaxes is strict again."""
    yield
    flags.apply(Determinism(cpu="portable", relax=()))


@pytest.fixture
def attempt(config: Config, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Attempt:
    """A function that runs a loop, with `function` called by a module of its model."""

    def attempt(loop: Loop = PLAIN, function: Any = None, out: str = "run", **checkpoints: Any) -> Ended:
        capsys.readouterr()
        with Run(PROJECT, inside(config, prepared, 0, **checkpoints), tmp_path / out) as run:
            parts = Parts(run)
            if function:
                parts.model.insert(2, Calls(function))
            loop(run, parts)
        return Ended(tmp_path / out, capsys.readouterr().err.splitlines())

    return attempt


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x)


def power(x: Tensor) -> Tensor:
    return x**0.5


def angle(x: Tensor) -> Tensor:
    return torch.atan(x)


def later(x: Tensor) -> Tensor:
    with ExitStack() as stack:
        stack.callback(torch.sqrt, x)  # Python's own file calls it
    return x


PLANTED = {  # the function, the operation, the replacement
    "sqrt": (root, "sqrt float32", ". Use samebits.sqrt(x)"),
    "power": (power, "pow(0.5) float32", ". Use samebits.sqrt(x)"),
    "callback": (later, "sqrt float32", ". Use samebits.sqrt(x)"),
    "atan": (angle, "atan float32", ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_operation_is_told_with_module_line_and_replacement(name: str, attempt: Attempt):
    function, operation, replacement = PLANTED[name]
    ended = attempt(function=function)
    line = function.__code__.co_firstlineno + 1
    first, said = ended.message
    assert first == (f"{operation} at {THIS}:{line}, in 2 (Calls): its bits differ between CPUs{replacement}")
    assert said == "this run is out of the class cpu-portable: another CPU may compute other bits"
    assert ended.non_portable == [operation]
    assert ended.environment["class"] == f"cpu/{ended.environment['environment'][:16]}"
    assert ended.environment["preimage"]["cpu"]["model"] == ended.environment["informational"]["cpu"]
    stated = receipt.read(ended.out).stated["environment"]  # whose digest is that of its preimage
    assert stated["class"] == ended.environment["class"]
    facts = read_json(ended.out / names.RUN)
    assert facts["tags"]["repro.environment"] == ended.environment["environment"]
    assert environments(ended.environment) == (ended.environment["environment"],)


@pytest.mark.parametrize(
    ("name", "foreach", "root", "remedy"),
    [
        ("AdamW", False, "sqrt", "AdamW(..., fused=True)"),
        ("AdamW", True, "_foreach_sqrt", "AdamW(..., fused=True)"),
        ("RMSprop", False, "sqrt", "an optimizer with fused=True, such as AdamW"),
    ],
)
def test_optimizer_that_is_not_fused_is_told_by_its_line_with_its_own_remedy(
    name: str, foreach: bool, root: str, remedy: str, attempt: Attempt
):
    def loop(run: Run, parts: Parts) -> None:
        parts.optimizer = getattr(torch.optim, name)(parts.model.parameters(), lr=0.01, foreach=foreach)
        PLAIN(run, parts)

    ended = attempt(loop)
    assert ended.non_portable == [f"{root} float32"]
    assert ended.message[0].startswith(f"{root} float32 at loops.py:")
    assert ended.message[0].endswith(f": its bits differ between CPUs. Use {remedy}")


def other(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A compiler whose code computes otherwise than what it was made of."""
    return lambda *values: tuple(1.25 * result for result in graph(*values))


def test_what_the_owner_compiles_is_compiled_in_each_step_and_told(attempt: Attempt, monkeypatch: pytest.MonkeyPatch):
    def begun(stop: bool = False, **more: Any) -> Ended:
        torch._dynamo.reset()  # as in a process of its own

        def loop(run: Run, parts: Parts) -> None:
            for step in parts.steps(run):
                good(step, parts)
                run._stop.came = stop and step.number == 0
            run.finish()

        return attempt(loop, function=torch.compile(lambda x: x * 0.1, backend=other), **more)

    whole = begun(out="whole")
    assert whole.message[0].startswith(f"torch.compile at {THIS}:") and whole.non_portable == ["torch.compile"]
    assert whole.environment["class"].startswith("cpu/")
    assert whole.environment["preimage"]["compiler"]["version"]
    with pytest.raises(Preempted):
        begun(stop=True)
    resumed = begun()
    assert read_json(resumed.out / names.ENVIRONMENT) == whole.environment
    assert (resumed.out / names.WEIGHTS).read_bytes() == (whole.out / names.WEIGHTS).read_bytes()
    monkeypatch.setenv("CXX", "g++ -ffast-math")
    assert begun(out="fast").environment["environment"] != whole.environment["environment"]


def same(x: Tensor) -> Tensor:
    return (exact.sqrt(x) + x**2 * torch.rsqrt(x)) / 8


def test_proven_operations_and_the_exact_root_are_told_of_no_run(attempt: Attempt):
    ended = attempt(function=same)
    assert ended.message == [] and ended.non_portable == []
    assert ended.environment["class"].startswith("cpu-portable/torch-")
    assert ended.environment["preimage"]["cpu"]["model"] is None


def test_default_project_stays_in_the_class(untracked: Trained):
    recorded = read_json(untracked.out / names.ENVIRONMENT)
    assert recorded["class"].startswith("cpu-portable/torch-") and "portable" not in untracked.done.stderr


def test_backward_pass_and_initial_weights_are_seen(attempt: Attempt):
    def loop(run: Run, parts: Parts) -> None:
        with torch.no_grad():
            parts.model[0].weight.copy_(torch.acos(parts.model[0].weight))
        each_step(good)(run, parts)

    ended = attempt(loop, function=Backwards.apply)
    assert ended.non_portable == ["acos float32", "atan float32"]


def bent(x: Tensor) -> Tensor:
    return torch.tanh(x)


def test_gradient_of_an_operation_is_told_at_the_line_of_the_call(attempt: Attempt, monkeypatch: pytest.MonkeyPatch):
    known = {name: kinds for name, kinds in portable.table().items() if name != "tanh_backward"}
    monkeypatch.setattr(portable, "table", lambda: known)
    ended = attempt(function=bent)
    line = bent.__code__.co_firstlineno + 1
    unmeasured = "it is not in the portability table"
    assert ended.message[0] == f"tanh_backward float32 at {THIS}:{line}, in 2 (Calls): {unmeasured}"


def test_many_operations_are_counted_and_none_is_nothing():
    lines = opening.reported_of({f"op{number} float32": f"op{number} at model.py:1" for number in range(9)})
    assert len(lines) == opening.SHOWN + 2 and "3 more operations" in lines[-2]
    assert opening.reported_of({}) == []


# ---- what the watch changes


def test_watch_changes_no_bit(attempt: Attempt, monkeypatch: pytest.MonkeyPatch):
    watched = attempt(function=root)
    monkeypatch.setattr(watch.Operations, "begin", lambda self: None)
    monkeypatch.setattr(watch.Operations, "watched", lambda self, on=True: nullcontext())
    alone = attempt(function=root, out="alone")
    assert alone.message == [] and watched.message
    same = [hashlib.sha256((each.out / "model.safetensors").read_bytes()).digest() for each in (watched, alone)]
    assert same[0] == same[1]


def test_only_the_first_step_is_watched_and_no_mode_is_left(attempt: Attempt):
    def mode() -> object:
        return torch.utils._python_dispatch._get_current_dispatch_mode()

    def body(step: Any, parts: Parts) -> None:
        seen.append(mode() is not None)
        good(step, parts)

    def failing(step: Any, parts: Parts) -> None:
        raise Crash

    seen: list[bool] = []
    attempt(each_step(body))
    assert seen == [True, False, False] and mode() is None
    with pytest.raises(Crash):
        attempt(each_step(failing), out="failed")
    assert mode() is None


# ---- resumed, and on other CPUs


def stopped(after: int) -> Loop:
    """A loop that crashes after so many steps, once the last one's checkpoint is written."""

    def loop(run: Run, parts: Parts) -> None:
        for step in parts.steps(run):
            if step.number == after:
                run._keeper.finish()  # type: ignore[union-attr]
                raise Crash
            good(step, parts)

    return loop


def resumed(attempt: Attempt, meanwhile: Callable[[], object], **more: Any) -> Ended:
    """A run that crashed after two steps, and went on."""
    with pytest.raises(Crash):
        attempt(stopped(2), every=1, **more)
    meanwhile()
    return attempt(every=1, **more)


def test_resumed_run_is_in_the_environment_that_its_first_step_has_shown(attempt: Attempt):
    ended = resumed(attempt, lambda: None, function=root)
    assert [line for line in ended.message if "portable" in line or "environment" in line] == []
    assert ended.non_portable == ["sqrt float32"] and ended.environment["class"].startswith("cpu/")
    facts = read_json(ended.out / names.RUN)
    assert environments(ended.environment) == (ended.environment["environment"],) and facts["resumed"] == [2]


def test_run_that_is_resumed_on_another_cpu_says_so(attempt: Attempt, monkeypatch: pytest.MonkeyPatch):
    ended = resumed(attempt, lambda: monkeypatch.setattr(environment, "_cpu_model", lambda: "another"), function=root)
    (line,) = [line for line in ended.message if "in another numeric environment: equal bits" in line]
    assert "cpu.model" in line and ended.environment["class"].startswith("mixed/")


def test_run_of_proven_operations_goes_on_on_another_cpu(attempt: Attempt, monkeypatch: pytest.MonkeyPatch):
    ended = resumed(attempt, lambda: monkeypatch.setattr(environment, "_cpu_model", lambda: "another"))
    assert ended.message == [] and ended.environment["class"].startswith("cpu-portable/")


def test_what_one_of_two_ranks_calls_is_told_by_the_lead(prepared: Path, tmp_path: Path):
    arguments = str(prepared), str(tmp_path / "run")
    logs = {"out": tmp_path / "out", "err": tmp_path / "err"}
    code = Warm(*arguments, ranks=2, script=TESTS / "rooted.py", **logs).wait()
    message = logs["err"].read_text()
    assert code == 0, message
    assert message.count("atan float32 at rooted.py:") == 1 and message.count("out of the class cpu-portable") == 1
    assert read_json(tmp_path / "run" / names.ENVIRONMENT)["preimage"]["cpu"]["non_portable"] == ["atan float32"]


# ---- the table


def test_table_holds_what_was_found_to_differ_and_what_was_found_equal():
    table = portable.table()
    for name in ("sqrt", "pow(0.5)", "atan", "acos", "log10", "_foreach_sqrt", "_euclidean_dist"):
        assert "-float32" in table[name], name
    for name in ("sqrt", "tan", "asin", "log"):
        assert "-float64" in table[name], name
    for name in ("exp", "log", "tanh", "erf", "rsqrt", "pow", "addmm", "convolution", "_fused_adamw", "bernoulli"):
        assert "float32" in table[name], name


def test_kind_of_number_is_part_of_an_operation():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            calls.append(" ".join(portable.operation(function, args, result)))
            return result

    calls: list[str] = []
    x = torch.ones(3)
    with Seen():
        for function in (torch.exp, torch.exp_):
            function(x)
        x.double().exp()
        x.bfloat16().exp()
        x.long() + 1
        torch.zeros(2)
        x**2, x**x, x**0.5, torch._foreach_pow([x], 0.5)
    assert calls == [
        "exp float32", "exp float32", "_to_copy float32", "exp float64", "_to_copy float32", "exp bfloat16",
        "_to_copy float32", "add integers", "zeros float32", "pow float32", "pow float32", "pow(0.5) float32",
        "_foreach_pow(0.5) float32",
    ]  # fmt: skip


# ---- samebits verify


@pytest.mark.parametrize("met", [{}, {"sqrt float32": "sqrt float32 at model.py:1: its bits differ between CPUs"}])
def test_verify_tells_the_operations_of_its_first_training(
    met: dict[str, str], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from samebits.analysis import verify

    def train(project: Project, way: verify.Way, settings: Any, start: Any, *length: float) -> verify.Row:
        folder = project.root / way.folder
        folder.mkdir(parents=True)
        (folder / names.METRIC_ROWS).write_text('{"step": 2, "metrics": {"epoch": 1}}')
        record = {"environment": "", "class": "", "preimage": {}, "informational": {"non_portable": met}}
        (folder / names.ENVIRONMENT).write_text(json.dumps(record))
        return verify.Row(way.name, "EQUAL", "0" * 64)

    monkeypatch.setattr(verify, "_train", train)
    message: list[str] = []
    project = Project(tmp_path / "src" / "tides")
    list(verify.train_in_all_ways(project, config, 1, None, {}, message.append, verify.chosen(["once more"])))
    assert message == (["\n".join(opening.reported_of(met))] if met else [])
