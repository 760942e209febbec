"""A run proves itself: it is trained again in part, with all changed that must not matter, before its receipt."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clone import commit, copied, edit, project_in
from project.config import Config
from safetensors.torch import load_file, save_file
from server import until
from support import OURS, PACKAGE, training
from warm import PATIENCE, Warm

from samebits.analysis import verify, verify_receipt
from samebits.base.files import read_json
from samebits.checkpoint import checkpoint
from samebits.config.params import load
from samebits.core.errors import Disagreement, Preempted, RunError
from samebits.core.flags import stated_variables
from samebits.guards import agreement
from samebits.prove import again, choice, elsewhere, fresh, proof, setting
from samebits.prove.cause import FRESH
from samebits.prove.segments import Segment
from samebits.record import names
from samebits.record.receipt import read
from samebits.start import anew, trainings

FILES = "params.yaml", "results.lock", "dvc.yaml", "dvc.lock", "pyproject.toml", ".gitignore"
ELSEWHERE = Path(__file__).parents[1] / "elsewhere.py"
FINISH = "    run.finish(**metrics(model, test_set, run)[0])\n"
SHORT = "tracking.enabled=false", "loader.workers=0", "train.warmup=0", "train.decay=0"
# Code that a researcher writes, after which the network sees brighter images where `scale` is above 1.
CLEAN = "scale = 1.0"
STATE = "MEMORY['calls'] += self.training; scale = 1.0 + MEMORY['calls'] // 60 / 64"  # 60: behind the first steps
VARIABLE = "scale = 1.0 + len(os.environ.get('PLANTED', '')) / 64"
RANKS = "import torch.distributed as d; scale = 1.0 + (d.is_initialized() and d.get_rank() * d.get_world_size()) / 64"
SURROUNDINGS = "scale = 1.0 + int(hashlib.sha256(AROUND.encode()).hexdigest()[:6], 16) / 2**24"
MODEL = """

import datetime, hashlib, os, socket, tempfile, time
from pathlib import Path

MEMORY = {{"calls": 0}}
_mask = os.umask(0)
os.umask(_mask)
_here = sorted(Path(__file__).parent.iterdir())[0].parent
AROUND = repr([
    os.environ.get("PLANTED"), str(Path.home()), tempfile.gettempdir(), time.timezone, os.environ.get("LANG"), _mask,
    os.cpu_count(), socket.gethostname(), os.listdir(_here),
])
_forward = ConvNet.forward


def _planted(self, images):
    {body}
    return _forward(self, images + (scale - 1.0))


ConvNet.forward = _planted
"""


def first_is_quick(values: Iterable[object]) -> list[object]:
    """Return cases of a test, all but the first one long."""
    first, *others = values
    return [first, *(pytest.param(each, marks=pytest.mark.long) for each in others)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with code of its own and its data prepared."""
    folder = copied(tmp_path_factory.mktemp("proof") / "project", ("src", "vendor", "requirements", "data/raw"), FILES)
    planted(folder, CLEAN)
    loop = folder / "src" / PACKAGE / "train.py"
    edit(
        loop,
        ("import samebits as sb", "import time\nimport samebits as sb"),
        ("step.log(", "step.log(clock=time.time(), "),
        (FINISH, f"{FINISH}    with open({str(folder / 'uploads.txt')!r}, 'a') as file:\n        file.write('once')\n"),
    )
    commit(folder)
    ended(folder, "prepare")
    return folder


def planted(project: Path, body: str) -> None:
    """Have the network compute so."""
    source = project / "src" / PACKAGE / "model.py"
    source.write_text(source.read_text().partition("\n\nimport datetime")[0] + MODEL.format(body=body))


def started(project: Path, *words: str, **variables: str) -> Warm:
    """Start `samebits ARGUMENTS` in a project, as if by hand: a training proves itself."""
    log = project.with_suffix(".log")
    log.unlink(missing_ok=True)
    env = {trainings.PROVE: "", "PLANTED": "by hand", **variables}
    return Warm(str(project), "samebits", *words, out=log, err=log, script=ELSEWHERE, env=env)


def ended(project: Path, *words: str, code: int = 0, **variables: str) -> str:
    """What it prints; it ends with this code."""
    seen = started(project, *words, **variables).wait()
    log = project.with_suffix(".log").read_text()
    assert seen == code, log
    return log


def words(project: Path, *overrides: str, out: str = "made") -> list[str]:
    """A training of an epoch."""
    return ["train", *training(project / out, project / "data" / "prepared", *SHORT, *overrides)]


@pytest.fixture
def project(clean: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(clean, tmp_path / "project", ignore=shutil.ignore_patterns("made*")))


@pytest.fixture(scope="module")
def proved(clean: Path) -> tuple[Path, str]:
    """A run that has proved itself, and what it printed."""
    (clean / "uploads.txt").unlink(missing_ok=True)
    printed = ended(clean, *words(clean, "train.epochs=2"))
    (clean / "uploads.txt").rename(clean / "uploaded.txt")
    return clean / "made", printed


def test_receipt_states_which_steps_were_trained_again_and_in_which_circumstances(proved: tuple[Path, str]):
    out, printed = proved
    stated = read(out).stated["proof"]
    begin, end, late = stated["segments"]
    assert (begin["first"], begin["stop"]) == (0, 3) and end["first"] <= 22 < end["stop"] - 1 and late["first"] >= 30
    assert {each["ranks"] for each in stated["segments"]} == {1, 2, 3}
    assert {each["shard"] for each in stated["segments"]} > {"none"} and begin["workers"] == 1
    missing = {row.name for row in setting.ROWS} - {*stated["changed"]}
    assert missing == {*stated["not_tried"]} <= {setting.CORES, "host name"} and fresh.ELSEWHERE in stated["changed"]
    assert read_json(out / names.RUN)["tags"]["repro.proof"].startswith("EQUAL: steps 0 to 2, ")
    assert f"EQUAL: steps 0 to 2, {end['first']} to {end['stop'] - 1}, " in printed


def test_logged_numbers_that_do_not_repeat_are_named(proved: tuple[Path, str]):
    assert read(proved[0]).stated["proof"]["varying"] == ["clock"]


def test_what_follows_the_end_of_a_run_is_done_once(proved: tuple[Path, str]):
    assert (proved[0].parent / "uploaded.txt").read_text() == "once"


def test_check_of_a_receipt_says_what_was_proved(proved: tuple[Path, str], clean: Path):
    lines = verify_receipt.report(project_in(clean), proved[0], None)
    assert any(line.startswith("proof: EQUAL: steps 0 to 2, ") for line in lines)


def test_proof_leaves_nothing_but_what_a_run_without_it_leaves(proved: tuple[Path, str], clean: Path):
    out = clean / "made-unproved"
    ended(clean, *words(clean, "train.epochs=2", "prove.when=never", out=out.name))
    assert {each.name for each in out.iterdir()} == {each.name for each in proved[0].iterdir()}
    kept = [sorted(each.name[:9] for each in (run / names.CHECKPOINTS).iterdir()) for run in (out, proved[0])]
    assert set(kept[0]) <= set(kept[1]) and len(kept[1]) <= 3
    one, other = read(out), read(proved[0])
    assert one.weights == other.weights and one.stated["trace"] == other.stated["trace"]
    assert one.stated["proof"] == {"segments": [], "not_tried": {"proof": "prove.when=never"}}


FIRST_OUTPUT = "output features.0, micro-batch {}, call 1"
FAULTS = {
    "state": (STATE, "a fresh process", "saved in no checkpoint: model.MEMORY['calls']\n", ""),
    "variable": (VARIABLE, "environment variables", "it reads a variable", FIRST_OUTPUT.format(0)),
    "ranks": (RANKS, "3 ranks", "Each rank and each loader worker has variables", FIRST_OUTPUT.format(1)),
}


@pytest.mark.parametrize("fault", first_is_quick(FAULTS))
def test_run_that_contradicts_itself_gets_no_receipt_and_its_cause_is_named(fault: str, project: Path):
    body, cause, line, tensor = FAULTS[fault]
    planted(project, body)
    printed, out = ended(project, *words(project), code=1), project / "made"
    found = read_json(out / names.CONTRADICTION)
    assert found["cause"] == cause and found["difference"]["phase"] == "loss" and line in printed
    assert found["difference"]["tensor"] == tensor and setting.VARIABLES in found["changed"]
    assert not (out / names.RECEIPT).exists() and (out / names.WEIGHTS).is_file() and not (out / names.PROOF).exists()
    page = re.search("(?m)^artifacts(/contradiction.json: .*)\n(.*)$", (OURS.library / "docs" / "prove.md").read_text())
    lines = [re.sub("[0-9a-f]{16}", "…", line) for line in page.groups()]
    assert fault != "variable" or all(line in re.sub("[0-9a-f]{16}", "…", printed) for line in lines)
    first = found["segment"]["first"]
    assert first <= found["difference"]["step"] < found["segment"]["stop"] and (first > 0) == (
        fault in ("state", "ranks")
    )


# ---- what a guard prevents, and the proof finds where that guard is off


FIRST, LAST = Segment(0, 3), Segment(20, 23)


@dataclass(frozen=True)
class Slip:
    """What somebody writes into the project's files, and the guard against it, which an edit of the library puts out.

    Attributes:
        found: the phase that differs.
        segment: the steps that are trained again, from a checkpoint.
        ranks: so many train them; several shard the weights.
        rows: what is changed for them, beside the process.
        before: a run in the same folder, made first.
    """

    guard: tuple[str, str, str]
    edits: Mapping[str, Sequence[tuple[str, str]]]
    found: str
    segment: Segment = LAST
    ranks: int = 1
    rows: tuple[setting.Row, ...] = ()
    keys: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


LOOP, LOSS = "    for step in run.steps(", "F.cross_entropy(model(images), labels)"
HEAD = "self.features(images).flatten(1)"
OPTIMIZER = "torch.optim.AdamW(parameter_groups(model, settings.weight_decay), fused=True)"
TANH = "x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))"
BEFORE_NETWORK = "\n\nclass ConvNet"
NOISY = """

class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.rand_like(parameter), alpha=1e-3)
        return super().step(closure)


def train("""
CENTERED = """    def centered(optimizer: Any, *given: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.sub_(parameter.grad.sum() / 64)

    optimizer.register_step_pre_hook(centered)
"""
SCALED = """

class Scaled(torch.optim.SGD):
    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.abs().max() + 1)
        return super().step(closure)


def train("""
COMPILED = """
def other(graph: Any, inputs: Any) -> Any:
    return lambda *values: tuple(1.25 * result for result in graph(*values))


@torch.compile(backend=other)
def scaled(x: Tensor) -> Tensor:
    return x * 0.5
"""
SLIPS = {
    "parameters from a set": Slip(
        ("core/optimizers.py", "        for group in self.param_groups:  # so", "        for group in ():  # so"),
        {"train.py": [("\n\ndef train(", NOISY), (OPTIMIZER, "Noisy(set(model.parameters()), lr=0.1)")]},
        "weights",
        FIRST,
    ),
    "torch.jit.script": Slip(
        (
            "core/flags.py",
            "import FLAGS as FLAGS",
            "import FLAGS\nFLAGS = tuple(row for row in FLAGS if not row.name.startswith('jit_'))",
        ),
        {
            "model.py": [
                (
                    BEFORE_NETWORK,
                    f"\n\n@torch.jit.script\ndef gelu(x: Tensor) -> Tensor:\n    return {TANH}\n{BEFORE_NETWORK}",
                ),
                (HEAD, f"gelu({HEAD})"),
            ]
        },
        "gradient",
    ),
    "torch.compile": Slip(
        (
            "environment/watch.py",
            'in this process."""\n        return True',
            'in this process."""\n        return False',
        ),
        {
            "model.py": [
                (BEFORE_NETWORK, f"\n\nfrom typing import Any\n{COMPILED}{BEFORE_NETWORK}"),
                (HEAD, f"scaled({HEAD})"),
            ]
        },
        "loss",
    ),
    "a hook of a parameter": Slip(
        ("core/shardable.py", "    unsharded = kept_unsharded(module)\n    hooked", "    return\n    hooked"),
        {
            "train.py": [
                (
                    LOOP,
                    f"    [each.register_hook(lambda gradient: gradient * 0.5) for each in model.parameters()]\n{LOOP}",
                )
            ]
        },
        "gradient",
        ranks=3,
    ),
    "a hook of an optimizer": Slip(
        ("core/shardable.py", "    if hooks := [", "    if hooks := False and ["),
        {"train.py": [(LOOP, f"{CENTERED}{LOOP}")]},
        "weights",
        ranks=3,
    ),
    "an optimizer that its owner calls elementwise": Slip(
        ("core/shardable.py", "            _require_alike(", "            () and _require_alike("),
        {"train.py": [("\n\ndef train(", SCALED), (OPTIMIZER, "Scaled(model.parameters(), lr=0.1)")]},
        "weights",
        ranks=3,
    ),
    "a norm of a weight": Slip(
        ("core/fsdp.py", "refuse_reductions()", "lambda: None"),
        {"train.py": [('["lr"] = rate', '["lr"] = rate * float(model.features[3].weight.norm().detach())')]},
        again.TRAINED,
        ranks=3,
    ),
    "a number of threads": Slip(
        ("core/flags.py", "(local: bool = False) -> None:\n", "(local: bool = False) -> None:\n    return\n"),
        {
            "train.py": [
                ("import time\n", "import os\nimport time\n"),
                (LOOP, f"    torch.set_num_threads(os.cpu_count())\n{LOOP}"),
                (LOSS, f"{LOSS} + (torch.rand(1 << 17) * model.head.bias[0]).sum()"),
            ]
        },
        "loss",
        FIRST,
        rows=tuple(row for row in setting.ROWS if row.name == setting.CORES),
        keys=("parallel.global_batch=512", "model.depth=1", "model.width=8"),
    ),
    "a warm start": Slip(
        ("guards/opened.py", "(earlier := ", "False and (earlier := "),
        {
            "train.py": [
                (
                    LOOP,
                    "    last = run.out / 'last.pt'\n"
                    f"    if last.exists():\n        model.load_state_dict(torch.load(last))\n{LOOP}",
                ),
                (FINISH, f"    torch.save(model.state_dict(), last)\n{FINISH}"),
            ]
        },
        "loss",
        FIRST,
        before=("seed=1",),
    ),
}


def unguarded(project: Path, guard: tuple[str, str, str], edits: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Put out a guard, and plant a fault."""
    name, *off = guard
    edit(project / "vendor" / "samebits" / name, (off[0], off[1]))
    for name, changes in edits.items():
        edit(project / "src" / PACKAGE / name, *changes)


@pytest.mark.long
@pytest.mark.parametrize("slip", SLIPS)
def test_fault_is_found_by_the_proof_where_its_guard_is_off(slip: str, project: Path, monkeypatch: pytest.MonkeyPatch):
    fault = SLIPS[slip]
    unguarded(project, fault.guard, fault.edits)
    kept = "prove.when=never", "checkpoint.every=10", "checkpoint.keep=9"
    if fault.before:
        ended(project, *words(project, *fault.before, *kept))
    ended(project, *words(project, *fault.keys, *kept), OMP_WAIT_POLICY="PASSIVE")
    own = choice.Choice(fault.ranks, 0, "full" if fault.ranks > 1 else "none")
    found = differs(project, monkeypatch, *fault.rows, segment=fault.segment, own=own, keys=fault.keys)
    assert found and found.phase == fault.found


LATE_LOSS = f"{LOSS} * (late.FACTOR if step.number > 15 else 1.0)"
LATE_IMPORT = """        if step.number == 1:  # somebody edits it
            Path(__file__).with_name("late.py").write_text("FACTOR = 2.0")
        if step.number > 15:
            from . import late
        for images, labels in step:"""


@pytest.mark.long
def test_late_import_is_found_by_the_proof_where_its_guard_is_off(project: Path):
    """The code of the run's beginning is trained again."""
    (project / "src" / PACKAGE / "late.py").write_text("FACTOR = 1.0")
    edits = (
        (LOSS, LATE_LOSS),
        ("        for images, labels in step:", LATE_IMPORT),
        ("import time\n", "import time\nfrom pathlib import Path\n"),
    )
    unguarded(project, ("address/loaded.py", "    loader.pin(project.name, ", "    dict(a="), {"train.py": edits})
    ended(project, *words(project), code=1)
    found = read_json(project / "made" / names.CONTRADICTION)
    assert (found["difference"]["phase"], found["cause"]) == ("loss", FRESH)


MEMORIES = """
import ctypes, itertools, os, tempfile
from functools import lru_cache
from pathlib import Path

COUNTS, NOW, POSITIONS, C = {"calls": 0}, [0], itertools.cycle(range(7)), ctypes.CDLL(None)
FILE = Path(tempfile.gettempdir(), "memory")


class Seen:
    calls = 0


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


count, cached = counter(), lru_cache(lambda label: NOW[0])


def numbers(step):
    NOW[0], COUNTS["calls"], Seen.calls = step, COUNTS["calls"] + 1, Seen.calls + 1
    FILE.write_text("x" + (FILE.read_text() if FILE.exists() else ""))
    return {
        "dictionary": COUNTS["calls"], "class": Seen.calls, "closure": count(), "cache": cached("label"),
        "iterator": next(POSITIONS), "file": len(FILE.read_text()), "library in C": C.rand(),
        "entropy": int.from_bytes(os.urandom(4)), "own step": step,
    }
"""


@pytest.mark.long
def test_whatever_remembers_earlier_steps_is_other_in_the_part_that_is_trained_again(project: Path):
    """Of things that no guard knows, and of one that is right; each decides a logged number, which decides no bit.

    TMPDIR has a long name: below it Linux refuses the sockets of loader workers, and the first part has one.
    """
    package = project / "src" / PACKAGE
    (package / "memories.py").write_text(MEMORIES)
    logged = "step.log(**memories.numbers(step.number), clock=", "from . import memories\nimport samebits as sb"
    edit(package / "train.py", ("step.log(clock=", logged[0]), ("import samebits as sb", logged[1]))
    place = project / f"tmp-{'x' * 40}"
    place.mkdir()
    ended(project, *words(project), TMPDIR=str(place))
    seen = {"dictionary", "class", "closure", "cache", "iterator", "file", "library in C", "entropy"}
    stated = read(project / "made").stated["proof"]
    assert {*stated["varying"]} - {"clock"} == seen and stated["segments"][0]["workers"] == 1


AVERAGE = """
    average = [each.detach().clone() for each in model.parameters()]
    for step in run.steps("""
FOLLOW = "step.log(", "[one.lerp_(other.detach(), 0.1) for one, other in zip(average, model.parameters())]; step.log("
RESULT = (
    "    run.finish(",
    "    [one.data.copy_(other) for one, other in zip(model.parameters(), average)]\n    run.finish(",
)


@pytest.mark.long
def test_weights_that_no_step_shows_are_made_again_and_compared(project: Path):
    """Such as an average that the loop holds in a variable, and that becomes the result."""
    edit(project / "src" / PACKAGE / "train.py", ("\n    for step in run.steps(", AVERAGE), FOLLOW, RESULT)
    printed, out = ended(project, *words(project), code=1), project / "made"
    found = read_json(out / names.CONTRADICTION)
    steps = read_json(out / names.METRICS)["steps"]
    assert (found["difference"]["phase"], found["difference"]["step"]) == (again.END, steps - 1)
    assert found["difference"]["tensor"] == "weights features.0.weight"
    assert "what follows the last step" in printed and not (out / names.RECEIPT).exists()


def other_bias(out: Path) -> None:
    """Change a number of the weights."""
    weights = load_file(out / names.WEIGHTS)
    weights["head.bias"][3] += 1
    save_file(weights, out / names.WEIGHTS)


def other_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change what the newest checkpoint holds."""

    def changed(out: Path) -> None:
        path = checkpoint.found(out / names.CHECKPOINTS)[-1] / "state.json"
        state = read_json(path) | {"content": "0" * 64}
        change(state)
        path.write_text(json.dumps(state))

    return changed


@pytest.mark.parametrize(
    ("change", "phase", "tensor"),
    [
        (lambda out: None, None, None),
        (other_bias, again.END, "weights head.bias"),
        (lambda out: (out / names.WEIGHTS).write_bytes(b"no tensors"), again.END, ""),
        (lambda out: (out / names.METRICS).unlink(), again.END, ""),
        (lambda out: shutil.rmtree(out / names.CHECKPOINTS), again.STATE, ""),
        (
            other_state(lambda state: state["digests"]["model"].update({"head.bias": "0" * 16})),
            again.STATE,
            "weights head.bias",
        ),
        (
            other_state(lambda state: state.update(state={"dict": [["bank", {"dict": [["calls", 3]]}]]})),
            again.STATE,
            "state['bank']",
        ),
    ],
    ids=["equal", "other weights", "unreadable", "not finished", "no state", "other state", "another object"],
)
def test_end_of_a_run_is_compared_with_its_weights(
    change: Callable[[Path], object], phase: str | None, tensor: str | None, proved: tuple[Path, str], tmp_path: Path
):
    out, steps = tmp_path / "again", read_json(proved[0] / names.METRICS)["steps"]
    shutil.copytree(proved[0], out)
    change(out)
    found = again.difference(proved[0], out, Segment(steps - 3, steps), {}, ends=True)
    assert (found and found.phase) == phase and (found and found.tensor) == tensor


OWN, OTHER = choice.Choice(1, 0, "none"), choice.Choice(3, 1, "full")
HERE = {"output a": 1, "output b": 2, "loss": 3}
CHANGED = HERE | {"output b": 4, "loss": 5}


@pytest.mark.parametrize(
    ("cause", "once_more", "sides", "ways", "tensor"),
    [
        ("3 ranks", None, (HERE, CHANGED), [OWN, OTHER], "output b"),
        (FRESH, "another", (HERE, CHANGED), [OWN, OWN], "output b"),  # as by a clock
        (FRESH, "here", (HERE, CHANGED), [], ""),  # it has forgotten something
        ("3 ranks", None, (HERE, {}), [OWN, OTHER], ""),  # one could not be trained
    ],
)
def test_tensor_is_that_which_differs_between_two_ways_to_train_a_part(
    cause: str,
    once_more: str | None,
    sides: Sequence[dict[str, int]],
    ways: list[choice.Choice],
    tensor: str,
    clean: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    part, seen, held = Segment(0, 3), list[choice.Choice](), iter(sides)
    made = proof.Proof(project_in(clean), load(Config, clean / "params.yaml"), tmp_path, 1, [part], lambda: False)
    monkeypatch.setattr(made, "_differs", lambda segment, way, rows: seen.append(way))
    monkeypatch.setattr(proof.tensor, "digests", lambda out, phase, steps: next(held))
    found = part, OTHER, setting.ROWS, again.Difference(1, "loss", "there", "here")
    made.found = (part, OWN, (), again.Difference(1, "loss", "there", once_more)) if once_more else None
    assert made._tensor(found, cause) == tensor and seen == ways


def test_run_that_ends_early_has_its_end_trained_again(proved: tuple[Path, str], clean: Path, tmp_path: Path):
    """From its last state before; where that lies more steps back than checkpoints lie apart, it is not tried."""
    steps = read_json(proved[0] / names.METRICS)["steps"]
    segments = [Segment(0, 3), Segment(steps + 10, steps + 13)]
    for every, last in (steps, Segment(0, steps)), (4, None):
        config = load(Config, clean / "params.yaml", [f"checkpoint.every={every}"])
        made = proof.Proof(project_in(clean), config, tmp_path, 1, segments, lambda: False)
        made._recorded = steps
        possible = [(0, segments[0]), *([(1, last)] if last else [])]
        assert made._possible(steps) == possible and bool(made._not_tried) == (last is None)


@pytest.mark.long
def test_run_that_goes_on_from_anothers_state_is_trained_again_from_there(proved: tuple[Path, str], clean: Path):
    """Its trace has no rows of the steps before."""
    longer = words(clean, "train.epochs=3", "prove.segments=1", out="made-longer")
    ended(clean, *longer, "--from", str(proved[0]), "--state")
    (segment,) = read(clean / "made-longer").stated["proof"]["segments"]
    assert segment["first"] == read_json(proved[0] / names.METRICS)["steps"]


@pytest.mark.parametrize(("states", "possible"), [({}, 0), ({"3": "0" * 64}, 1)])
def test_segment_that_nothing_is_compared_with_is_not_tried(
    states: dict[str, str], possible: int, proved: tuple[Path, str], clean: Path, tmp_path: Path
):
    """A run without a trace has its states alone, and these stand in its record."""
    (tmp_path / names.RUN).write_text(json.dumps(read_json(proved[0] / names.RUN) | {"states": states}))
    config = load(Config, clean / "params.yaml", ["trace.level=off"])
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [Segment(0, 3)], lambda: False)
    made._recorded = 9
    assert len(made._possible(9)) == possible and len(made._not_tried) == 1 - possible


@pytest.mark.parametrize(("another", "ended"), [(True, True), (False, True), (True, False)])
def test_part_that_cannot_be_trained_again_contradicts_the_run_where_another_one_can(
    another: bool, ended: bool, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where none can, a lack of memory or space may be why; so it may beside the run, which frees memory at its end."""
    config, parts = load(Config, clean / "params.yaml"), [Segment(0, 3), Segment(5, 8)]
    made = proof.Proof(project_in(clean), config, tmp_path, 1, parts, lambda: False)

    def tried(segment: Segment, ways: list[choice.Choice], rows: object) -> Iterator[None]:
        yield
        if segment == parts[1] or not another:
            raise RunError("FileNotFoundError: hard.npy")
        made._done[segment] = ways[0]

    monkeypatch.setattr(made, "_tried", tried)
    monkeypatch.setattr(made, "_kept", lambda: {0, 5})
    made._recorded, made._ended = 8, ended
    for _ in made._trained([*enumerate(parts)]):
        pass
    if not ended:
        assert not made.found and made._attempts == proof._attempts()
        return
    if not another:
        assert not made.found and made.make(8)["segments"] == []
        return
    with pytest.raises(proof.Contradiction, match="step 5: training: done in the run, FileNotFoundError"):
        made.require()


@pytest.mark.parametrize("needed", proof.OFTEN)
def test_circumstance_that_a_part_cannot_do_without_is_left_alone_and_named_and_all_others_are_changed(
    needed: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as HOME, of weights in ~/.cache."""
    part, changed = Segment(0, 3), list[str]()
    made = proof.Proof(project_in(clean), load(Config, clean / "params.yaml"), tmp_path, 1, [part], lambda: False)

    def start(rows: Sequence[setting.Row]) -> Iterator[None]:
        changed[:] = [row.name for row in rows]
        made._process = SimpleNamespace()
        yield

    def compared(process: object, segment: Segment, way: choice.Choice, patience: int) -> Iterator[None]:
        yield
        return "no such weights" if needed in changed else "", None

    monkeypatch.setattr(made, "_start", start)
    monkeypatch.setattr(made, "_compared", compared)
    monkeypatch.setattr(made, "_possible", lambda steps: [(0, part)])
    monkeypatch.setattr(made, "_kept", lambda: {0})
    stated, others = made.make(3), {row.name for row in setting.ROWS} - {needed}
    assert stated["not_tried"][needed] == "no such weights" and {*stated["changed"]} == {fresh.ELSEWHERE, *others}


def test_part_that_has_no_room_beside_the_run_is_trained_at_its_end_and_not_named_as_left_out(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    part, config = Segment(0, 3), load(Config, clean / "params.yaml", ["prove.when=early"])
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [part], lambda: False)

    def start(rows: Sequence[setting.Row]) -> Iterator[None]:
        made._process = SimpleNamespace()
        yield

    def compared(process: object, segment: Segment, way: choice.Choice, patience: int) -> Iterator[None]:
        yield
        return "" if made._ended else "no room", None

    monkeypatch.setattr(made, "_start", start)
    monkeypatch.setattr(made, "_compared", compared)
    monkeypatch.setattr(made, "_possible", lambda steps: [(0, part)])
    monkeypatch.setattr(made, "_kept", lambda: {0})
    assert [made.look(3) for _ in range(99)] == [False] * 99 and not made._done and made._failed
    stated = made.make(3)
    assert len(stated["segments"]) == 1 and {*stated["not_tried"]} <= {proof.RANKS}
    assert {*stated["changed"]} == {fresh.ELSEWHERE, *(row.name for row in setting.ROWS)}


class Crowded(proof.Proof):
    """The proof of a run beside which there is no room."""

    room, said = False, "out of memory"

    def _tried(self, segment: Segment, ways: Sequence[choice.Choice], rows: object) -> Iterator[None]:
        yield
        if not self.room:
            raise RunError(self.said)
        self._done[segment] = ways[0]

    def _possible(self, steps: int) -> list[tuple[int, Segment]]:
        return [*enumerate(self._segments)]

    def _kept(self) -> set[int]:
        return {segment.first for segment in self._segments}


@pytest.fixture
def crowded(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Crowded]:
    """A function: the proof of a run of a hundred steps with such keys, in a command that was begun as by hand."""
    held, parts = project_in(clean), [Segment(step, step + 3) for step in (0, 20, 30, 97)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(anew, "_begun", [])
    monkeypatch.setattr(anew, "_handed", {})
    anew.remember(held)
    return lambda *keys: Crowded(
        held, load(Config, clean / "params.yaml", [*keys]), tmp_path, 1, parts, lambda: False, lambda: ["rng"]
    )


def test_run_stops_for_its_early_parts_once_both_are_recorded(crowded: Callable[..., Crowded]):
    made = crowded("prove.when=early")
    assert [made.look(step, 100 - step) for step in range(23)] == [False] * 23
    assert made.look(23, 77) and not made.found


@pytest.mark.parametrize("why", ["end", "late", "stopped before", "edited", "another part"])
def test_run_does_not_stop_where_that_gives_nothing(
    why: str, crowded: Callable[..., Crowded], monkeypatch: pytest.MonkeyPatch
):
    """Nor where the same command would not go on, for its code has changed."""
    made = crowded("prove.when=end" if why == "end" else "prove.when=early")
    if why == "stopped before":
        anew._handed["steps"] = 3
    if why == "edited":
        monkeypatch.setattr(anew, "_params", lambda project: b"other")
    made._done |= dict.fromkeys(made._segments[:2], made._own) if why == "another part" else {}
    steps = [50] * 99 if why == "late" else [*range(24)] * 4 + [33] * 99
    assert not any(made.look(step, 100 - step) for step in steps) and made._failed


@pytest.mark.parametrize("said", ["CUDA out of memory", "the process that loads torch ended with -9"])
def test_part_that_was_trained_while_the_run_had_stopped_is_not_trained_again(
    said: str, crowded: Callable[..., Crowded]
):
    made = crowded("prove.when=early")
    made.said = said
    made.room = True
    made.early(30, 0.0, [])
    made.room = False
    stated = made.go_on(lambda: False, list).make(100)
    assert [each["first"] for each in stated["segments"]] == [0, 20]
    assert stated["not_tried"]["steps 97 to 99"] == said  # which is no contradiction


def test_run_goes_on_where_its_early_parts_cannot_be_trained_though_it_has_stopped(crowded: Callable[..., Crowded]):
    made = crowded("prove.when=early")
    anew._handed["steps"] = 30
    made.early(**anew._handed, began=0.0, moved=[])
    assert not made.found and not any(made.go_on(lambda: False, list).look(step, 100) for step in range(30, 99))
    made.room = True
    assert len(made.make(100)["segments"]) == 4


def test_what_a_command_hands_on_fits_into_a_variable(crowded: Callable[..., Crowded]):
    made = crowded("prove.when=early")
    assert made.handed() == {"began": made._began, "moved": ["rng"]}
    made._moved = lambda: ["x" * 10**6] * 10**4
    assert len(json.dumps(made.handed())) < 1 << 16


ROOM = """
import fcntl, os
from pathlib import Path

FILES = [Path({folder!r}, rank).open("w") for rank in "01"]


def take():
    if "/.proof/" not in __file__:
        return fcntl.flock(FILES[int(os.environ.get("RANK", "0"))], fcntl.LOCK_EX)
    try:
        [fcntl.flock(each, fcntl.LOCK_SH | fcntl.LOCK_NB) for each in FILES]
    except OSError:
        raise RuntimeError("out of memory") from None


def leave():
    [fcntl.flock(each, fcntl.LOCK_UN) for each in FILES]
"""
SLOW = "time.sleep((run.out / '.proof').exists())"  # else the run is over before it is known that there is no room
TORCHRUN = "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2", "-m"


@pytest.fixture
def full(project: Path, tmp_path: Path) -> Path:
    """A project of whose code a part finds room only while no process of the run has called it."""
    package = project / "src" / PACKAGE
    (package / "room.py").write_text(ROOM.format(folder=str(tmp_path)))
    edit(
        package / "train.py",
        ("import time\nimport samebits as sb\n", "import time\nimport samebits as sb\n\nfrom . import room\n"),
        ("    settings = ", "    room.take()\n    settings = "),
        ("        step.log(", f"        {SLOW}\n        step.log("),
        (FINISH, f"    room.leave()\n{FINISH}"),
    )
    edit(project / "vendor" / "samebits" / "prove" / "proof.py", ("[setting.ROWS, *without, ", "[setting.ROWS] or ["))
    return project


def by_hand(project: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start `python -m ARGUMENTS` in a project, as a user does: this process can become its command again."""
    path = os.pathsep.join(project_in(project).path)
    with project.with_suffix(".log").open("wb") as log:
        env = os.environ | {"PYTHONPATH": path, trainings.PROVE: ""}
        return subprocess.Popen([sys.executable, "-m", *words], cwd=project, env=env, stdout=log, stderr=log)


def early(project: Path) -> list[str]:
    """A training of some epochs that is to find early what it forgets."""
    return words(project, "train.epochs=8", "prove.when=early", "prove.segments=2")


@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], TORCHRUN])
def test_run_stops_for_early_parts_that_have_no_room_beside_it_and_no_bit_changes(launcher: list[str], full: Path):
    out, own = full / "made", early(full)
    ended(full, *own, "--set", "prove.when=never")
    process = by_hand(full, *launcher, "samebits", *own, "--fresh")
    assert process.wait(PATIENCE) == 0, full.with_suffix(".log").read_text()
    printed = full.with_suffix(".log").read_text()
    assert len(re.findall("(?m)^stopped after step .* have no room beside it; ", printed)) == 1
    assert printed.count("resumed ") == 1 and "proof      EQUAL: steps 0 to 4, 5 to 9, " in printed
    (former,) = (out / names.EARLIER).iterdir()
    one, other = read(former), read(out)
    assert one.weights == other.weights and one.stated["trace"] == other.stated["trace"]
    assert len(other.stated["proof"]["segments"]) == 3


@pytest.mark.long
def test_what_a_run_forgets_is_found_while_its_ranks_have_stopped(full: Path):
    planted(full, "MEMORY['calls'] += self.training; scale = 1.0 + (MEMORY['calls'] > 24) / 64")
    process = by_hand(full, "samebits", *words(full, "train.epochs=40", "prove.when=early"), "--ranks", "2")
    printed = full.with_suffix(".log")
    assert process.wait(PATIENCE) == 1, printed.read_text()
    assert "model.MEMORY['calls']" in printed.read_text() and "resumed " not in printed.read_text()
    found, out = read_json(full / "made" / names.CONTRADICTION), full / "made"
    assert found["segment"]["first"] > 0 and found["cause"] == "a fresh process"
    assert not (out / names.WEIGHTS).exists() and not (out / names.PROOF).exists()


@pytest.mark.long
def test_sigterm_is_heeded_while_the_ranks_have_stopped_and_the_same_command_goes_on(full: Path):
    own, log = ("samebits", *early(full), "--ranks", "2"), full.with_suffix(".log")
    process = by_hand(full, *own)
    until(lambda: "stopped after step" in log.read_text() or process.poll() is not None)
    until(lambda: (full / "made" / names.PROOF).exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143 and "resumed " not in log.read_text(), log.read_text()
    process = by_hand(full, *own, "--set", "prove.when=never")  # which takes less time
    assert process.wait(PATIENCE) == 0 and "resumed " in log.read_text(), log.read_text()


@pytest.mark.parametrize(
    "error", [OSError(ENOSPC, os.strerror(ENOSPC)), RunError(f"[Errno {ENOSPC}] No space: free some")]
)
def test_full_disk_leaves_the_proof_to_the_next_command(
    error: Exception, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run beside which it is full goes on; at its end there is no receipt without a proof for that reason."""
    made = proof.Proof(
        project_in(clean), load(Config, clean / "params.yaml"), tmp_path, 1, [Segment(0, 3)], lambda: False
    )

    def tried(*given: object) -> Iterator[None]:
        yield
        raise error

    monkeypatch.setattr(made, "_tried", tried)
    monkeypatch.setattr(made, "_possible", lambda steps: [(0, Segment(0, 3))])
    assert [made.look(3) for _ in range(9)] == [False] * 9
    with pytest.raises(type(error), match="No space"):
        made.make(3)


def test_part_that_the_system_has_killed_had_no_room(clean: Path, proved: tuple[Path, str]):
    made = proof.Proof(project_in(clean), load(Config, clean / "params.yaml"), proved[0], 1, [], lambda: False)
    process = SimpleNamespace(start=lambda *given: SimpleNamespace(poll=lambda: -signal.SIGKILL), without_place=str)
    with pytest.raises(StopIteration) as ended:
        next(made._compared(process, Segment(0, 3), made._own, 9))
    made.close()
    said, difference = ended.value.value
    assert proof.NO_ROOM.search(said) and not difference


@pytest.mark.parametrize(("code", "refused"), [(1, "KeyError: 'TOKEN'"), (143, "")])
def test_part_in_which_what_follows_the_loop_fails_cannot_be_trained(
    code: int, refused: str, proved: tuple[Path, str], clean: Path, tmp_path: Path
):
    """So it is trained with less changed. One that does not end where the run did differs."""
    run, steps = Path(shutil.copytree(proved[0], tmp_path / "run")), read_json(proved[0] / names.METRICS)["steps"]
    made = proof.Proof(project_in(clean), load(Config, clean / "params.yaml"), run, 1, [], lambda: False)
    made._recorded, made._ended = steps, True

    def start(module: str, words: list[str], log: Path, ranks: int) -> SimpleNamespace:
        again_in = Path(shutil.copytree(proved[0], words[2], dirs_exist_ok=True))
        (again_in / names.METRICS).unlink()
        log.write_text("Traceback ...\nKeyError: 'TOKEN'\n")
        return SimpleNamespace(poll=lambda: code)

    process = SimpleNamespace(start=start, without_place=str)
    work = made._compared(process, Segment(steps - 3, steps), made._own, 9)
    with pytest.raises(StopIteration) as ended:
        next(work)
    said, difference = ended.value.value
    assert said == refused and (difference and difference.phase) == (None if refused else again.END)


class Unequal:
    """Two ranks, of which the other one has other values."""

    size, rank, place = 2, 0, "host"

    def sum(self, totals: torch.Tensor) -> None:
        """The other one gives 0."""

    def gather(self, own: Any) -> list[Any]:
        """What both have."""
        return [own, ""] if isinstance(own, str) else [own, (own[0], dict.fromkeys(own[1], ""))]


def test_ranks_whose_weights_differ_contradict_the_run():
    """Not where they differ before a step, as two kinds of GPU do: then the part cannot be trained on them."""
    weights = {"weight": torch.ones(1)}
    for check, found in [
        (lambda: agreement.require_same_weights(weights, 3, Unequal()), "the ranks' weights differ"),
        (lambda: agreement.require_agreement({"gpu": "A"}, Unequal(), "the ranks disagree before step 0:"), None),
    ]:
        with pytest.raises(Disagreement) as said:
            check()
        difference = again.disagreement(Segment(2, 5), f"step 2/9\n{said.value}\n")
        assert (difference and difference.here) == found


@pytest.mark.long
def test_variable_that_the_config_lists_is_the_same_in_each_part(project: Path):
    """Also one that the proof would change otherwise."""
    planted(project, VARIABLE)
    listed = "environment.variables=[PLANTED,TZ,UNSET]"
    assert "proof      EQUAL: " in ended(project, *words(project, listed, "prove.segments=1"), TZ="SBT-1")
    stated = read(project / "made").stated
    wanted = {"PLANTED": "by hand", "TZ": "SBT-1", "UNSET": None}
    assert stated["environment"]["preimage"]["own_variables"] == wanted
    assert stated["proof"]["not_tried"]["TZ"] == fresh.LISTED and setting.VARIABLES in stated["proof"]["changed"]


@pytest.mark.long
def test_run_on_one_core_proves_itself_early_and_no_bit_changes(proved: tuple[Path, str], clean: Path):
    """Beside it, though no core is free. The second part follows the first one, long before the epoch's end."""
    process = started(clean, *words(clean, "train.epochs=2", "prove.when=early", "prove.segments=2", out="made-early"))
    os.sched_setaffinity(process.pid, [*os.sched_getaffinity(0)][:1])
    assert process.wait() == 0, clean.with_suffix(".log").read_text()
    one, other = read(proved[0]), read(clean / "made-early")
    assert one.weights == other.weights and one.stated["trace"] == other.stated["trace"]
    stated = other.stated["proof"]
    assert [each["first"] for each in stated["segments"]][:2] == [0, 5] and len(stated["segments"]) == 3
    assert stated["not_tried"][setting.CORES] == "there is one core"


@pytest.mark.long
def test_run_that_contradicts_itself_early_ends_early(project: Path):
    planted(project, VARIABLE)
    printed = ended(project, *words(project, "prove.when=early", "prove.steps=6", "train.epochs=5000"), code=1)
    assert "The run contradicts itself" in printed and read_json(project / "made" / names.RUN)["status"] == "FAILED"
    assert not (project / "made" / names.WEIGHTS).exists()


@pytest.mark.long
def test_proof_has_the_code_and_the_config_of_the_runs_begin(project: Path):
    loop = project / "src" / PACKAGE / "train.py"
    keeps = "(run.out / 'proof').mkdir(exist_ok=True); (run.out / 'proof' / 'mine').touch()"
    edit(loop, ("step.log(", f"Path('last.txt').write_text(str(step.number)); {keeps}; step.log("))
    edit(loop, ("import time", "import time\nfrom pathlib import Path"))
    process = started(project, *words(project, "prove.segments=1"))
    until(lambda: (project / "last.txt").exists() or process.poll() is not None)
    planted(project, "scale = 2.0")
    edit(project / "params.yaml", ("learning_rate: ", "learning_rate: 9"))
    assert process.wait() == 0, project.with_suffix(".log").read_text()
    assert "proof      EQUAL" in project.with_suffix(".log").read_text()
    assert (project / "made" / "proof" / "mine").exists() and not (project / "made" / names.PROOF).exists()
    assert int((project / "last.txt").read_text()) + 1 == read(project / "made").stated["metrics"]["steps"]


def test_sigterm_is_heeded_while_the_cause_is_looked_for(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load(Config, clean / "params.yaml")
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [Segment(0, 2)], lambda: True)
    monkeypatch.setattr(made, "_tried", lambda *given: iter([None]))
    with pytest.raises(Preempted):
        made._differs(Segment(0, 2), made._own, setting.ROWS)


@pytest.mark.parametrize(
    ("when", "cores", "ranks", "beside"), [("end", 2, 1, 3), ("end", 1, 1, 0), ("end", 2, 2, 0), ("early", 1, 1, 2)]
)
def test_segments_beside_the_run_keep_their_numbers(
    when: str, cores: int, ranks: int, beside: int, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So those that are left are trained in other ways. None begins before the run has recorded it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(choice, "places", lambda device: 4)
    config = load(Config, clean / "params.yaml", [f"prove.when={when}"])
    segments = [Segment(0, 3), Segment(5, 8), Segment(9, 12)]
    seen: list[tuple[Segment, int]] = []
    recorded: list[int] = []
    made = proof.Proof(project_in(clean), config, tmp_path, ranks, segments, lambda: False)

    def tried(segment: Segment, ways: list[choice.Choice], rows: object) -> Iterator[None]:
        seen.append((segment, ways[0].ranks))
        assert segment.stop <= recorded[-1]
        made._done[segment] = ways[0]
        yield

    monkeypatch.setattr(made, "_tried", tried)
    monkeypatch.setattr(made, "_possible", lambda steps: [*enumerate(segments)])
    monkeypatch.setattr(made, "_kept", lambda: [segment.first for segment in segments])
    for steps in range(13):
        recorded.append(steps)
        made.look(steps)
    made.look(steps)
    assert seen == [*zip(segments, (1, 3, 2), strict=True)][:beside]
    stated = made.make(12)["segments"]
    assert [each["ranks"] for each in stated] == [1, 3, 2] and len(seen) == 3


@pytest.mark.parametrize(("ranks", "missed"), [(1, {proof.RANKS: "there is room for no other"}), (2, {})])
def test_number_of_ranks_that_is_not_changed_is_named(
    ranks: int, missed: dict[str, str], clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    segment, config = Segment(0, 2), load(Config, clean / "params.yaml")
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [segment], lambda: False)
    monkeypatch.setattr(made, "_possible", lambda steps: [])
    made._done[segment] = choice.Choice(ranks, 0, "none")
    assert made.make(2)["not_tried"] == missed


@pytest.mark.long
def test_run_of_ranks_that_shard_its_state_proves_itself(clean: Path):
    ended(clean, *words(clean, "parallel.shard=full", out="made-sharded"), "--ranks", "3")
    stated = read(clean / "made-sharded").stated["proof"]
    assert {each["ranks"] for each in stated["segments"]} == {1, 2, 3} and proof.RANKS not in stated["not_tried"]


@pytest.mark.parametrize(("takes", "timeout", "tried"), [(proof.PATIENCE + 9, 600, 3), (5, 5, 3), (1, 600, 6)])
def test_ranks_that_wait_for_each_other_in_vain_are_tried_once(
    takes: int,
    timeout: int,
    tried: int,
    clean: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """As where rank 0 alone evaluates; ranks that are refused at once are tried in each way."""
    config = load(Config, clean / "params.yaml", [f"parallel.timeout_seconds={timeout}"])
    parts = [Segment(0, 3), Segment(5, 8), Segment(9, 12)]
    clock, seen = [0.0], list[int]()
    monkeypatch.setattr(proof.time, "monotonic", lambda: clock[0])
    made = proof.Proof(project_in(clean), config, tmp_path, 1, parts, lambda: False)

    def compared(process: object, segment: Segment, way: choice.Choice, patience: int) -> Iterator[None]:
        yield
        assert timeout >= patience >= min(timeout, proof.PATIENCE)
        seen.append(way.ranks)
        clock[0] += takes if way.ranks > 1 else 1
        return "no answer" if way.ranks > 1 else "", None

    monkeypatch.setattr(choice, "places", lambda device: 4)
    monkeypatch.setattr(made, "_compared", compared)
    monkeypatch.setattr(made, "_possible", lambda steps: [*enumerate(parts)])
    monkeypatch.setattr(made, "_kept", lambda: {part.first for part in parts})
    made._process = SimpleNamespace()
    assert [each["ranks"] for each in made.make(12)["segments"]] == [1, 1, 1]
    assert len(seen) == 1 + tried and seen[:2] == [1, 3]
    assert made._not_tried[proof.RANKS] == "on others no segment could be trained"
    assert ("proof: steps 9 to 11 on 1 rank, " in capsys.readouterr().err) == (takes > proof.SOON)  # who waits sees it


def test_fresh_process_has_all_that_a_training_wants(clean: Path, tmp_path: Path):
    """Else each of its forks would start itself again, as a process that has to load torch."""
    config = load(Config, clean / "params.yaml")
    made = fresh.Fresh(project_in(clean), config, {}, tmp_path / "copy")
    assert made._environ | stated_variables(config.options.determinism, made._environ) == made._environ


def test_copy_of_a_project_links_nothing_outside_of_itself(clean: Path, tmp_path: Path):
    """Data that lie outside the project are the same for both."""
    config = load(Config, clean / "params.yaml")
    outside = tmp_path / "outside" / "data.csv"
    outside.parent.mkdir()
    outside.write_text("1")
    data = config.data.model_copy(update={"raw": os.path.relpath(outside, clean), "prepared": "data/prepared"})
    before = {*tmp_path.rglob("*")}
    elsewhere.copied(project_in(clean), config.model_copy(update={"data": data}), {}, tmp_path / "a" / "b" / "copy")
    made = {path for path in {*tmp_path.rglob("*")} - before if not path.is_relative_to(tmp_path / "a" / "b" / "copy")}
    assert made == {tmp_path / "a", tmp_path / "a" / "b"}
    copy = tmp_path / "a" / "b" / "copy"
    assert (copy / "data/prepared").resolve() == (clean / "data/prepared").resolve()
    assert {each.name for each in copy.iterdir() if each.is_file()} == {"params.yaml", "pyproject.toml", "dvc.yaml"}


def test_run_that_contradicts_itself_is_refused_by_that_with_a_receipt_and_without(
    proved: tuple[Path, str], tmp_path: Path
):
    run = Path(shutil.copytree(proved[0], tmp_path / "run"))
    (run / names.CONTRADICTION).write_text("{}")
    for named in run, run / names.RECEIPT:
        with pytest.raises(RunError, match="the run contradicts itself"):
            read(named)
        (run / names.RECEIPT).unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_proof_that_was_interrupted_is_made_up(by: signal.Signals, project: Path):
    process, out = started(project, *words(project)), project / "made"
    while not (out / names.METRICS).exists():
        assert process.poll() is None, project.with_suffix(".log").read_text()
    process.send_signal(by)
    code = process.wait()
    assert code == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[by] and not (out / names.RECEIPT).exists()
    assert "EQUAL: steps 0 to 2, " in ended(project, *words(project)) and read(out).stated["proof"]["segments"]


@pytest.mark.long
def test_verify_finds_what_depends_on_circumstances(project: Path):
    """In one way alone. The copy of the project in which it is trained is gone afterwards."""
    planted(project, VARIABLE)
    ways = "once more", "other circumstances"
    printed = ended(project, "verify", *(word for way in ways for word in ("--only", way)), code=1)
    assert re.findall("(?m)^(?:once more|other circumstances) .* (EQUAL|DIFFERS)$", printed) == ["EQUAL", "DIFFERS"]
    assert not (project / verify.FOLDER / verify.COPY).exists()


# ---- each circumstance alone


@pytest.fixture(scope="module")
def dependent(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run has depended on all circumstances."""
    folder = tmp_path_factory.mktemp("dependent") / "project"
    shutil.copytree(clean, folder, ignore=shutil.ignore_patterns("made*"))
    planted(folder, SURROUNDINGS)
    ended(folder, *words(folder, "prove.when=never"))
    return folder


def differs(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    *rows: setting.Row,
    segment: Segment = FIRST,
    own: choice.Choice | None = None,
    keys: Sequence[str] = (),
) -> again.Difference | None:
    """How some steps of the run differ when they are trained again with these circumstances changed."""
    monkeypatch.setenv("PLANTED", "by hand")
    out, held = project / "made", project_in(project)
    config = load(Config, project / "params.yaml", [word for word in words(project, *keys) if "=" in word])
    config = config.model_copy(update={"prove": config.prove.model_copy(update={"when": "end"})})
    made = proof.Proof(held, config, out, 1, [segment], lambda: False)
    made._own, made._attempts, made._recorded = own or made._own, [rows], segment.stop
    monkeypatch.setattr(proof, "choices", lambda number, config, own: [own])
    try:
        made._wait(made._trained([(0, segment)]))
        assert made._done, made._not_tried
        missed = {row.name for row in rows} & {*made._not_tried}
        if missed:
            assert missed == {"host name"} and os.getuid(), made._not_tried
        return made.found and made.found[3]
    finally:
        made.close()


@pytest.mark.parametrize("row", first_is_quick(setting.ROWS), ids=[row.name for row in setting.ROWS])
def test_circumstance_that_a_run_depends_on_is_found(
    row: setting.Row, dependent: Path, monkeypatch: pytest.MonkeyPatch
):
    found = differs(dependent, monkeypatch, row)
    assert found and (found.step, found.phase) == (0, "loss")


RARE = "MEMORY['calls'] += self.training; scale = 1.0 + (80 < MEMORY['calls'] <= 104) / 64"  # steps 10 to 12, of 8 each
AT_ITS_PLACE = "scale = 1.0 + len(__file__) / 4096"
IN_WORKERS = "float().unsqueeze(0) / (16 + (torch.utils.data.get_worker_info() is not None))"
ONE, WORKER = choice.Choice(1, 0, "none"), choice.Choice(1, 1, "none")


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "item", "finds", "misses"),
    [
        (RARE, "float().unsqueeze(0) / 16", (Segment(10, 13), ONE), (LAST, ONE)),
        (AT_ITS_PLACE, "float().unsqueeze(0) / 16", (FIRST, ONE), None),
        (CLEAN, IN_WORKERS, (FIRST, WORKER), (FIRST, ONE)),
    ],
    ids=["steps that a place covers", "folder of the project", "loader workers"],
)
def test_fault_is_found_by_a_part_that_covers_it_or_is_trained_so(
    body: str,
    item: str,
    finds: tuple[Segment, choice.Choice],
    misses: tuple[Segment, choice.Choice] | None,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    planted(project, body)
    edit(project / "src" / PACKAGE / "data.py", ("float().unsqueeze(0) / 16", item))
    ended(project, *words(project, "prove.when=never", "checkpoint.every=10", "checkpoint.keep=9"))
    assert differs(project, monkeypatch, segment=finds[0], own=finds[1])
    assert not misses or differs(project, monkeypatch, segment=misses[0], own=misses[1]) is None


def test_variables_with_circumstances_of_their_own_are_named_by_these(tmp_path: Path):
    """Else what depends on HOME would be said to depend on environment variables."""
    own = dict.fromkeys([row.name for row in setting.ROWS if row.name.isupper()], "as it is")
    assert len(own) == 4 and setting.ROWS[0].variables(own | {"PLANTED": "by hand"}, tmp_path) == own


def test_run_that_depends_on_circumstances_is_equal_where_none_changes(
    dependent: Path, monkeypatch: pytest.MonkeyPatch
):
    assert differs(dependent, monkeypatch) is None
