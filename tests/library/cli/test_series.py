"""Trainings that a verb compares: each is made once, and again only where it is not what was asked for."""

from pathlib import Path

import pytest
from clone import Forked, project_in
from project.config import Config
from support import PACKAGE

from samebits.analysis.series import Requested, Series
from samebits.core.errors import RunError
from samebits.start import trainings

PLAIN = Requested("plain")


@pytest.fixture
def message() -> list[str]:
    """What the series tells."""
    return []


@pytest.fixture
def series(project: Path, message: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Series:
    """A series of short trainings in a clone of this project."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(trainings, "run", Forked(tmp_path))
    return Series(project_in(project), Config, Path("build", "series"), ["train.epochs=1"], message.append)


@pytest.mark.long
def test_training_is_made_once_and_again_where_it_was_altered(series: Series, message: list[str]):
    first, second = series.make([PLAIN, PLAIN])
    assert first.bits == second.bits and first.folder == second.folder and first.bits[1]
    assert message[1].endswith("made before") and not message[0].endswith("made before")
    assert len(first.seconds()) == first.metrics["steps"] and min(first.seconds()) > 0
    assert first.memory() > 2**26 and "accuracy" in first.metrics
    for name in ("model.safetensors", "metrics.json", "trace/steps.bin"):
        path = first.folder / name
        path.write_bytes(path.read_bytes()[:-1] + b" ")
    assert series.one(PLAIN).bits == first.bits
    assert (first.folder / "model.safetensors").read_bytes()[-1:] != b" "
    # of one that was cut off on the way, and of a receipt of another config, nothing is believed
    (first.folder.parent / "requested.json").unlink()
    [again] = series.make([PLAIN])
    assert not message[-1].endswith("made before") and again.bits == first.bits


@pytest.mark.long
def test_repeats_and_edited_code_are_trainings_of_their_own(series: Series, project: Path, message: list[str]):
    one, other = series.make([PLAIN, Requested("repeat", number=1)])
    assert one.folder != other.folder and one.bits == other.bits
    model = project / "src" / PACKAGE / "model.py"
    before = model.read_text()
    model.write_text(before + "\nEDITED = 1\n")
    try:
        assert series.one(PLAIN).folder not in (one.folder, other.folder)
    finally:
        model.write_text(before)


@pytest.mark.long
def test_variables_of_relaxed_switches_are_those_that_are_asked_for(series: Series):
    """This process has the strict ones, and so had a fork."""
    relaxed = {"determinism.relax": ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED"]}
    made = series.one(Requested("two threads", relaxed, variables={"OMP_NUM_THREADS": "2"}))
    environment = made.receipt.stated["environment"]["preimage"]
    assert environment["threads"] == 2 and environment["variables"]["OMP_NUM_THREADS"] == "2"
    assert "PYTHONHASHSEED" not in environment["variables"]


def test_training_that_fails_is_told_and_not_kept(series: Series):
    with pytest.raises(RunError, match="decay"):
        series.one(Requested("broken", {"train.learning_rate": 1e30, "compute.nonfinite": "decay"}))
    with pytest.raises(RunError, match="not finite"):
        series.one(Requested("too fast", {"train.learning_rate": 1e30}))
    kept = [path.parent for path in series.project.root.glob("build/series/*/requested.json")]
    assert all((folder / "run" / "receipt.json").is_file() for folder in kept)
