"""What a guard prevents is found by the proof where that guard is off."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from clone import edit
from proving import ALONE, FINISH, FIRST, LAST, differs, ended, words
from support import PACKAGE

from samebits.base.files import read_json
from samebits.prove import again, choice, setting
from samebits.prove.cause import FRESH
from samebits.prove.segments import Segment
from samebits.record import names


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
        ranks=2,
    ),
    "a hook of an optimizer": Slip(
        ("core/shardable.py", "    if hooks := [", "    if hooks := False and ["),
        {"train.py": [(LOOP, f"{CENTERED}{LOOP}")]},
        "weights",
        ranks=2,
    ),
    "an optimizer that its owner calls elementwise": Slip(
        ("core/shardable.py", "            _require_alike(", "            () and _require_alike("),
        {"train.py": [("\n\ndef train(", SCALED), (OPTIMIZER, "Scaled(model.parameters(), lr=0.1)")]},
        "weights",
        ranks=2,
    ),
    "a norm of a weight": Slip(
        ("core/fsdp.py", "refuse_reductions()", "lambda: None"),
        {"train.py": [('["lr"] = rate', '["lr"] = rate * float(model.features[3].weight.norm().detach())')]},
        again.TRAINED,
        ranks=3,
        keys=("model.width=32",),  # else its sum has the same bits in any order
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
        keys=("parallel.global_batch=512", "parallel.micro_batches=8", "model.depth=1"),
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
    ended(project, *words(project, *kept, *fault.keys), OMP_WAIT_POLICY="PASSIVE")
    own = choice.Choice(fault.ranks, 0, "full" if fault.ranks > 1 else "none")
    (found,) = differs(project, monkeypatch, (fault.segment, own), rows=fault.rows, keys=fault.keys)
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
    ended(project, *words(project, ALONE), code=1)
    found = read_json(project / "made" / names.CONTRADICTION)
    assert (found["difference"]["phase"], found["cause"]) == ("loss", FRESH)
