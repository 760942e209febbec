"""`samebits noise --perturb`: one ULP is added where it was asked for, and nothing else is another."""

import itertools
import json
import math
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from click.testing import Result
from clone import Forked, verb
from project.config import Config
from support import OURS, PROJECT, Trained
from torch import nn

from samebits.address.manifest import sha256_file
from samebits.analysis import diff, results
from samebits.analysis.noise import perturb, perturbed
from samebits.analysis.noise.perturb import Moved, Perturbation, Row
from samebits.base.files import write_json
from samebits.config.params import load
from samebits.core.errors import RunError, UserError
from samebits.record import names
from samebits.start import trainings

AT = 3
TRAIN = perturb.train  # which a test replaces


# ---- trainings


class Children:
    """Trainings of the child, each made once."""

    def __init__(self, folder: Path, prepared: Path) -> None:
        self.folder, self.overrides = folder, (f"data.prepared={prepared}", "train.epochs=1")

    def __getitem__(self, kind: str) -> Path:
        if not (self.folder / kind).exists():
            with pytest.MonkeyPatch.context() as patched:
                if kind != "none":  # which is started as the verb does
                    patched.setattr(trainings, "run", Forked(self.folder))
                self.make(self.folder / kind, AT)
        return self.folder / kind

    def make(self, folder: Path, at: int) -> None:
        settings = load(Config, PROJECT / "params.yaml", self.overrides)
        TRAIN(OURS, settings, self.overrides, folder, at)

    def compared(self, kind: str, accepted: dict[str, float] | None = None) -> Perturbation:
        """What one ULP did."""
        return perturb.compared(self[kind], self["none"], kind, AT, "tolerance", accepted or {})


@pytest.fixture(scope="module")
def children(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Children:
    return Children(tmp_path_factory.mktemp("children"), prepared)


@pytest.mark.long
def test_child_without_a_change_is_the_honest_training(children: Children, untracked: Trained):
    """The clean control: by digest, and in all rows of the trace."""
    run = children["none"] / "run"
    assert sha256_file(run / "model.safetensors") == untracked.weights
    assert diff.load(run).root == diff.load(untracked.out).root
    found = children.compared("none")
    assert [row.weights for row in found.rows] == [0] * len(found.rows) == [row.loss for row in found.rows]
    assert found.first is None and found.growth is None and found.holds and found.changed is None
    assert all(moved.by == 0 for moved in found.metrics.values())
    kept = {sha256_file(children["none"] / f"{row.step}.safetensors") for row in found.rows}
    assert len(kept) == len(found.rows) > 5  # the weights of each step, and not those of one


FIRST = {"batch": "step 3, batch", "weight": "step 3, loss", "gradient": "step 3, gradient"}
KINDS = ["batch", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("weight", "gradient"))]


@pytest.mark.parametrize("kind", KINDS)
def test_change_is_seen_at_its_step_and_not_before(kind: str, children: Children):
    found = children.compared(kind)
    assert found.first == FIRST[kind]
    assert (found.rows[0].step, found.rows[0].weights, found.rows[0].loss) == (AT - 1, 0, 0)
    assert found.rows[1].step == AT and (found.rows[1].weights > 0 or kind == "gradient")
    assert found.rows[-1].step == found.steps - 1 and len(found.rows) <= 12
    before, after = (np.float32(found.changed[name]) for name in ("before", "after"))
    assert after == np.nextafter(before, np.float32(np.inf)) and found.changed["dtype"] == "float32"


@pytest.mark.parametrize("kind", ["none", "batch"])
def test_no_receipt_and_no_checkpoint_is_left(kind: str, children: Children):
    """An honest run cannot go on from there, and none is claimed."""
    held = [path.name for path in children[kind].rglob("*") if path.is_file()]
    assert "model.safetensors" in held and not [name for name in held if name.startswith("receipt")]
    assert not list((children[kind] / "run").glob("checkpoints/*"))


@pytest.mark.long
def test_run_that_ends_itself_before_the_change_is_told(tmp_path: Path):
    (tmp_path / "run").mkdir()
    write_json(tmp_path / perturbed.CHANGED, {"changed": None, "steps": 10, "probes": [4, 9]})
    write_json(tmp_path / "run" / names.METRICS, {"steps": 3})
    with pytest.raises(UserError, match="--at 5 seen, at most 2 wanted: the run ended itself after 3 steps"):
        perturb.compared(tmp_path, tmp_path, "weight", 5, "tolerance", {})


def test_step_that_the_run_does_not_have_is_refused(children: Children, tmp_path: Path):
    with pytest.raises(UserError) as refused:
        children.make(tmp_path / "batch", 23)
    message = str(refused.value).splitlines()[-1]  # before it, uncommitted code may be told
    assert message == "--at 23 seen, at most 22 wanted: the run has 23 steps, counted from 0"


# ---- the verb


@pytest.fixture
def requested(children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A function that asks the verb; its trainings are those that are made already."""

    def make(project: Any, settings: Any, overrides: Any, folder: Path, at: int) -> None:
        shutil.copytree(children[folder.name], folder)

    def ask(accepted: dict[str, float], *words: str) -> Result:
        monkeypatch.setattr(perturb, "accepted_change", lambda project: ("perturbation", accepted))
        message = ["noise", "--perturb", "batch", "--at", str(AT), "--out", str(tmp_path / "out"), *words]
        return verb(*message)

    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(perturb, "train", make)
    yield ask


def test_change_that_is_accepted_is_harmless(requested: Any, tmp_path: Path):
    done = requested({"accuracy": 0.02, "test_loss": 0.05})
    assert done.exit_code == 0, done.output
    moved = json.loads((tmp_path / "out" / "perturb.json").read_text())["metrics"]["test_loss"]["moved"]
    said = ["harmless: accuracy moved by 0, within 0.02", f"harmless: test_loss moved by {moved:.4g}, within 0.05"]
    assert done.stdout.splitlines()[:2] == said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["perturb.json"]


def test_change_that_is_not_accepted_matters(requested: Any, children: Children, tmp_path: Path):
    file = children["batch"] / "run" / "metrics.json"
    honest = file.read_text()
    file.write_text(json.dumps(json.loads(honest) | {"accuracy": 0.5}))
    try:
        done = requested({"accuracy": 0.02}, "--json")
    finally:
        file.write_text(honest)
    facts = json.loads(done.stdout)
    assert done.exit_code == 1 and not facts["holds"]
    assert facts["verdicts"][0].startswith("it matters: accuracy moved by ")
    assert facts["verdicts"][1].endswith("and perturbation in results.lock does not name it")
    assert not [*tmp_path.rglob("receipt*"), *tmp_path.rglob("*.safetensors")]


def test_interrupted_verb_leaves_no_training(requested: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(*given: Any) -> None:
        (given[3]).mkdir(parents=True)
        (given[3] / "weights").write_text("")
        raise RunError("no more disk")

    monkeypatch.setattr(perturb, "train", fail)
    done = requested({"accuracy": 0.02})
    assert done.exit_code == 1 and done.stderr == "no more disk\n" and not [*(tmp_path / "out").iterdir()]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("control", "changed", "accepted", "holds", "said"),
    [
        (0.5, 0.5, 0.0, True, "harmless: x moved by 0, within 0"),
        (0.5, 0.75, 0.25, True, "harmless: x moved by 0.25, within 0.25"),
        (0.5, 0.75, 0.2, False, "it matters: x moved by 0.25, more than 0.2"),
        (NAN, NAN, 1.0, False, "it matters: x is nan without the change and nan with it"),
        (0.5, NAN, 1.0, False, "it matters: x is 0.5 without the change and nan with it"),
        (INF, INF, 1.0, True, "harmless: x moved by 0, within 1"),
        (0.5, INF, 1.0, False, "it matters: x moved by inf, more than 1"),
        (0.5, 0.75, None, True, "not judged: x moved by 0.25, and tolerance in results.lock does not name it"),
    ],
)
def test_verdict(control: float, changed: float, accepted: float | None, holds: bool, said: str):
    moved = {"x": Moved(control, changed, accepted)}
    found = Perturbation("batch", 0, 1, {}, None, [], None, moved, "tolerance", [])
    assert (found.holds, found.verdicts) == (holds, [said])
    json.dumps(found.record(), allow_nan=False)


def test_metric_that_the_run_lacks_is_not_judged():
    found = Perturbation("batch", 0, 1, {}, None, [], None, {}, "tolerance", ["\x1b[2Jf1"])
    assert not found.holds and found.verdicts[0].isprintable() and "the run has no such metric" in found.verdicts[0]


# ---- what is accepted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tolerance: {accuracy: 0.02}\n", ("tolerance", {"accuracy": 0.02})),
        ("tolerance: {a: 0.02}\nperturbation: {a: 0, b: 1}\n", ("perturbation", {"a": 0, "b": 1})),
        ("tolerance: {accuracy: 0.02}\nperturbation:\n", ("tolerance", {"accuracy": 0.02})),
        ("tolerance:\n", "tolerance names no metric"),
        ("tolerance: {a: 1}\nperturbation: {}\n", "perturbation names no metric"),
        ("tolerance: {a: 1}\nperturbation: 3\n", "perturbation: 3 seen"),
        *((f"tolerance: {{a: {value}}}\n", "a number from 0 on wanted") for value in ("-1", ".nan", ".inf", "true")),
    ],
)  # fmt: skip
def test_accepted_change(text: str, expected: Any, tmp_path: Path):
    (tmp_path / "results.lock").write_text(f"{text}results: []\n")
    project = SimpleNamespace(root=tmp_path)
    if isinstance(expected, str):
        with pytest.raises(UserError) as refused:
            results.accepted_change(project)
        assert expected in str(refused.value) and "\n" not in str(refused.value)
    else:
        assert results.accepted_change(project) == expected


# ---- one ULP


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_element_moves_by_one_ulp(kind: torch.dtype):
    tensor = torch.tensor([[0.5, -2.0], [2.0, 1.0], [math.nan, math.inf]], dtype=kind).t()  # not contiguous
    before = tensor.clone()
    found = perturbed.nudge(tensor)
    assert found["index"] == [0, 1] and (tensor != before).nonzero().tolist() == [[0, 1], [0, 2]]  # NaN is at 0, 2
    assert tensor[0, 1] == torch.nextafter(before[0, 1], torch.tensor(math.inf, dtype=kind)) == found["after"]
    assert found["before"] == 2 < found["after"] and found["dtype"] == str(kind).removeprefix("torch.")


def test_largest_number_of_all_moves_down():
    largest = torch.tensor(torch.finfo(torch.float32).max)
    found = perturbed.nudge(largest)
    assert found["after"] < found["before"] and found["index"] == [] and largest == found["after"]


def test_tensor_without_a_finite_element_is_refused():
    with pytest.raises(UserError, match="no finite element"):
        perturbed.nudge(torch.tensor([math.nan, math.inf]))


Pair = namedtuple("Pair", "numbers labels")


def test_batch_is_copied_before_it_is_changed(tmp_path: Path):
    """A dataset may hand out what it keeps."""
    change = perturbed.Change(perturbed.Report(tmp_path), "batch", 1)
    kept = Pair(torch.tensor([1.0, 2.0]), torch.tensor([7]))
    before, first, second = (change.batch(step, 0, kept) for step in (0, 1, 1))
    assert isinstance(first, Pair) and first.numbers[1] == 2 + 2**-22
    assert before is second is kept and kept.numbers[1] == 2


@pytest.mark.parametrize("kind", ["batch", "weight", "gradient"])
def test_nothing_to_change_is_refused(kind: str, tmp_path: Path):
    change, model = perturbed.Change(perturbed.Report(tmp_path), kind, 0), nn.ReLU()
    with pytest.raises(UserError, match=f"--perturb {kind}: no "):
        change.weights(0, model), change.batch(0, 0, [torch.tensor([7])]), change.gradients(0, model)


@pytest.mark.parametrize(("at", "of"), [*itertools.product([0, 1, 5, 9], [10, 11, 23, 675, 10**6])])
def test_probes_begin_before_the_change_and_end_with_the_run(at: int, of: int):
    found = perturbed.probes(at, of)
    assert found == sorted(set(found)) and len(found) <= perturbed.ROWS and found[-1] == of - 1
    assert found[:2] == [at - 1, at] if at else found[0] == 0
    strides = np.diff([step for step in found if step >= at])
    assert of - at < 12 or (strides[0] < 4 and strides[-1] == strides.max() > 1)
    assert of - at > 11 or len(found) == of - at + bool(at)


# ---- growth


def test_growth_is_the_slope_before_it_saturates():
    noise = np.random.default_rng(0).normal(0, 0.1, 12)
    rows = [Row(step, 1e-8 * math.exp(0.5 * step + noise[step]), None) for step in range(12)]
    rows += [Row(step, 5e-6, None) for step in (20, 40, 80)]
    found = perturb.growing(rows)
    part = rows[: found.rows] if found else []
    theirs = scipy.stats.linregress([row.step for row in part], np.log([row.weights for row in part])).slope
    assert found and found.exponent == pytest.approx(theirs, rel=1e-12)
    assert found.doubling == math.log(2) / found.exponent
    assert max(row.weights for row in part[:-1]) < 0.1 * max(row.weights for row in rows) <= part[-1].weights


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [0.0, 1.0, 1.0], [1e-9, 1e-8, NAN], [1e-9, INF, 1.0]])
def test_growth_that_is_not_seen_is_not_told(weights: list[float]):
    assert perturb.growing([Row(step, each, None) for step, each in enumerate(weights)]) is None
