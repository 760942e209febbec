"""`samebits diff --values`: the tensors of a recorded step, made again, and by how much two of them differ."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clone import SETTINGS, Forked, project_in, verb
from safetensors.torch import load_file
from support import PACKAGE, training
from torch import Tensor, nn

from samebits.analysis.trust import Trust
from samebits.analysis.values import at, differences, how_much, recorded
from samebits.base.files import read_json, write_json
from samebits.core.digest import combined_digest
from samebits.core.errors import RunError, UserError
from samebits.core.observer import View
from samebits.core.ranks import World
from samebits.core.state import State
from samebits.record import chain, chains, names
from samebits.start import trainings
from samebits.trace import tensors, trace

OF_RANK = ("batch 0", ""), ("output a", ", call 1")

# ---- by how much

ONE = torch.tensor([1.0, 2.0, 3.0, 4.0])


def changed(tensor: Tensor, place: int, value: float | Tensor) -> Tensor:
    other = tensor.clone()
    other[place] = value
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [1, 3])
def test_ulps_count_the_representable_numbers_between(dtype: torch.dtype, steps: int):
    one = ONE.to(dtype)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    other = one.clone()
    other.view(whole)[2] += steps
    assert f", {steps} ULPs)" in how_much(one, other) and "most at [2]: 3.0 | 3.0" in how_much(one, other)
    assert how_much(one, other).startswith("1 of 4 numbers differ")


SMALLEST, TWO_OTHERS = torch.tensor([1e-45]), changed(changed(ONE, 0, 1.5), 3, 2.0)
WHOLE, MOST = torch.tensor([1, 2]), "1 of 2 numbers differ, by at most 3 (relative 0.6); most at [1]: 2 | 5"
TOLD: dict[str, tuple[Tensor, Tensor, str]] = {
    "ULPs on both sides of zero": (SMALLEST, -SMALLEST, ", 2 ULPs)"),
    "zeros": (torch.zeros(1), -torch.zeros(1), "1 of 1 numbers differ, by at most 0 (relative 0, 0 ULPs)"),
    "the largest": (ONE, TWO_OTHERS, "2 of 4 numbers differ, by at most 2 (relative 0.5,"),
    "its place": (ONE.view(2, 2), TWO_OTHERS.view(2, 2), "; most at [1, 1]: 4.0 | 2.0"),
    "NaN": (ONE, changed(changed(ONE, 1, torch.nan), 0, 99.0), "most at [1]: 2.0 | nan"),
    "infinity": (ONE, changed(changed(ONE, 1, torch.inf), 0, 99.0), "most at [1]: 2.0 | inf"),
    "whole numbers, without ULPs": (WHOLE, torch.tensor([1, 5]), MOST),
}


@pytest.mark.parametrize("what", TOLD)
def test_difference_is_told(what: str):
    one, other, message = TOLD[what]
    assert message in how_much(one, other)


def test_only_what_differs_in_the_phase_is_told():
    one = {"batch 0": ONE, "gradient first": ONE, "gradient last": ONE, "weights w": ONE}
    other = one | {"gradient first": changed(ONE, 0, 0.0), "gradient last": changed(ONE, 1, 0.0), "weights w": ONE + 1}
    names = [line.partition(":")[0] for line in differences(one, other, "gradient")]
    assert names == ["gradient last", "gradient first"]  # as the backward pass comes by them
    assert differences(one, other, "batch") == []


def test_tensors_of_all_ranks_are_read_in_the_order_of_a_step(tmp_path: Path):
    """The batches and outputs of each, then what all hold, which rank 0 writes."""
    (tmp_path / names.TRACE).mkdir()
    for rank in 1, 0:
        kept = tensors.Kept(0, tmp_path / names.rank_values(rank))
        kept.begin(0)
        kept.take({f"batch 0, micro-batch {rank}": ONE, f"output a, micro-batch {rank}, call 1": ONE, "loss": ONE})
        kept.save(is_main=rank == 0)
    batches = [f"{name}, micro-batch {rank}{call}" for rank in (0, 1) for name, call in OF_RANK]
    assert [name for name, _ in tensors.read(tmp_path)] == [*batches, "loss"]


@pytest.mark.parametrize(
    ("phase", "found"), [("weights", ["a, sum 2", "b, sum 2"]), ("gradient", ["b, sum 2", "a, sum 2"])]
)
def test_sums_of_a_step_that_follow_from_the_first_one_are_left_out(phase: str, found: list[str]):
    assert tensors.ordered(["c, sum 10", "a, sum 2", "b, sum 2"], phase) == found


# ---- a step made again


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings that make a step again are forked."""
    monkeypatch.setattr(trainings, "run", Forked(tmp_path))


def made_again(project: Path, run: Path, step: int) -> dict[str, Tensor]:
    """The values of a step of a run whose uncommitted code is that of the work tree."""
    return at(project_in(project), recorded(project_in(project), run, Trust(), print), step, lambda text: None)


@pytest.mark.long
def test_values_are_those_of_the_recorded_step(project: Path):
    """The last one; all is started as the verb does."""
    run = project / "artifacts"
    values = made_again(project, run, 22)
    row = chains.rows(run / names.STEP_ROWS, chain.STEP)[22]
    gradients = [value for name, value in values.items() if name.startswith("gradient ")]
    weights = {name.removeprefix("weights "): v for name, v in values.items() if name.startswith("weights ")}
    assert int(combined_digest(gradients)) % 2**64 == row["gradient"]
    assert int(values["loss"].view(torch.int64)) % 2**64 == row["loss"]
    assert int(combined_digest(weights.values())) % 2**64 == row["weights"]
    assert {f"batch {i}, micro-batch {micro_batch}" for i in (0, 1) for micro_batch in range(8)} <= set(values)
    assert "output head, micro-batch 7, call 1" in values
    final = load_file(run / "model.safetensors")
    assert final.keys() == weights.keys() and all(torch.equal(final[name], weights[name]) for name in final)


@pytest.mark.long
def test_command_tells_by_how_much_two_runs_differ(
    project: Path, tmp_path: Path, forked: None, monkeypatch: pytest.MonkeyPatch
):
    other = Path(shutil.copytree(project, tmp_path / "project"))
    source = other / "src" / PACKAGE / "train.py"
    source.write_text(source.read_text().replace("fused=True)", "fused=True, eps=1e-6)"))
    monkeypatch.chdir(other)
    words = training(other / "artifacts-other", other / "data" / "prepared", *SETTINGS)
    trainings.run(project_in(other), trainings.command("train", {}, *words))
    diff = "diff", "artifacts", "artifacts-other", "--values"
    done = verb(*diff, project=project_in(other))
    assert done.exit_code == 2 and "making step" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"artifacts/{names.PATCH}: ") and "--run-patch" in line
    done = verb(*diff, "--run-patch", project=project_in(other))
    assert done.exit_code == 1, done.stderr
    lines = done.stdout.splitlines()
    message = lines[lines.index("values at step 0, weights:") + 1]
    assert message.startswith("  weights features.0.weight: 288 of 288 numbers differ, by at most ")
    assert " ULPs); " in message


@pytest.mark.parametrize(
    ("identity", "message"),
    [*((word, "text of the form ") for word in ("../../../../x", "-x", "")), (None, "text wanted")],
)
def test_id_that_is_no_id_is_refused(identity: str | None, message: str, project: Path, tmp_path: Path):
    """A folder that is removed afterwards has its name."""
    run = Path(shutil.copytree(project / "artifacts", tmp_path / "run"))
    write_json(run / names.RUN, read_json(run / names.RUN) | {"id": identity})
    with pytest.raises(UserError, match=rf"run\.json: id: .*{message}"):
        recorded(project_in(project), run, Trust(run_patch=True), print)


def test_unfinished_run_is_made_again_from_its_own_patch_alone(project: Path, tmp_path: Path):
    run = Path(shutil.copytree(project / "artifacts", tmp_path / "run"))
    (run / names.RECEIPT).unlink()
    assert recorded(project_in(project), run, Trust(), print).patch == run / names.PATCH
    with (run / names.PATCH).open("a") as patch:
        patch.write("\n")
    with pytest.raises(RunError, match=r"code\.patch: missing or altered; the run is of uncommitted code"):
        recorded(project_in(project), run, Trust(run_patch=True), print)


@pytest.mark.long
def test_step_that_does_not_repeat_is_told(project: Path, tmp_path: Path, forked: None):
    run = Path(shutil.copytree(project / "artifacts", tmp_path / "run"))
    rows = chains.rows(project / "artifacts" / names.STEP_ROWS, chain.STEP).copy()
    (run / names.STEP_ROWS).write_bytes(b"")
    links = chain.Chain(run / names.STEP_ROWS, chain.STEP.itemsize)
    rows["gradient"][3] ^= 1  # what a flipped bit in memory left
    for row in rows:
        links.append(row.tobytes()[: chain.STEP.itemsize], int(row["step"]))
    with pytest.raises(RunError, match=r"step 3, made again: gradient has other bits than before"):
        made_again(project, run, 5)


def test_value_that_the_next_module_works_on_in_place_is_kept_as_it_was(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    batch = torch.randn(8, 4)
    wanted = model[0](batch).detach()
    assert (wanted < 0).any()
    message = trace.Trace("step", tmp_path, World(0, 1, torch.device("cpu")), values=0)
    loop: Any = SimpleNamespace(state=State(model, None), stop=1)
    message.begin(loop.state, 0, outputs=True)
    message.begin_step(View(loop, 0))
    message.batch(View(loop, 0, 0, [batch]))
    loss = model(batch).sum()
    loss.backward()
    message.gradients(View(loop, 0, loss=loss.double()))
    message.end_step(View(loop, 0), message.ballot(View(loop, 0)).sums.tolist(), [])
    kept = load_file(tmp_path / names.VALUES)
    assert torch.equal(kept["output 0, micro-batch 0, call 1"], wanted)
    assert torch.equal(kept["output 1, micro-batch 0, call 1"], wanted.relu())
