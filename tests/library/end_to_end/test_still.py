"""Data that change while a run reads them end it by name, and no checkpoint holds what came of them."""

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attempt import Finish, inside
from project import train as train_module
from project.config import Config
from support import train_here

from samebits import stage as stage_module
from samebits.checkpoint import checkpoint
from samebits.core.errors import UserError
from samebits.guards import stages
from samebits.guards.still import Still

NAME = "train-images.npy"


@pytest.fixture
def copied(config: Config, prepared: Path, tmp_path: Path) -> Config:
    """Settings of a training on a copy of the data."""
    shutil.copytree(prepared, tmp_path / "prepared")
    return inside(config, tmp_path / "prepared", workers=0, every=3)


def mapped(path: Path) -> None:
    """Another program writes a byte through a mapping."""
    images = np.load(path, mmap_mode="r+")
    images[0, 0, 0] ^= 1
    images.flush()


def written(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def linked(path: Path) -> None:
    path.chmod(0o444)
    os.link(path, path.parent.parent / "backup")


def replaced(path: Path) -> None:
    """As by a tool that restores the date."""
    beside = path.parent.parent / "beside"
    shutil.copy2(path, beside)
    beside.replace(path)


def added(path: Path) -> None:
    (path.parent / "new.npy").touch()


CHANGES: dict[Callable[[Path], None], str] = {
    mapped: f"{NAME}: SHA-256 ",
    Path.unlink: f"{NAME}: missing",
    added: "new.npy seen, but not in manifest.json",
    written: f"{NAME}: written again while the run read the data",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_is_refused_by_name(copied: Config, change: Callable[[Path], None]):
    still = Still(copied.data)
    still.require()
    change(Path(copied.data.prepared) / NAME)
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            still.require(local=True)
        assert CHANGES[change] in str(refused.value) and refused.value.local


@pytest.mark.parametrize("change", [linked, replaced], ids=lambda change: change.__name__)
def test_change_of_no_byte_and_no_date_is_let_through(copied: Config, change: Callable[[Path], None]):
    still = Still(copied.data)
    change(Path(copied.data.prepared) / NAME)
    still.require()


@pytest.mark.parametrize(("called", "times", "saved"), [("clip_grad_norm_", 4, 3), ("metrics", 0, 23)])
def test_run_ends_before_it_saves_and_goes_on_to_the_same_result(
    called: str, times: int, saved: int, copied: Config, finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Data change in the loop, or when all checkpoints are written: then the run has no receipt."""
    home = train_module.sb if called == "clip_grad_norm_" else train_module
    calls, function = count(), getattr(home, called)
    path = Path(copied.data.prepared) / NAME

    def changing(*given: Any) -> Any:
        if next(calls) == times:
            mapped(path)
        return function(*given)

    with monkeypatch.context() as patch, pytest.raises(UserError, match=rf"^data changed while .*{NAME}: SHA-256"):
        patch.setattr(home, called, changing)
        train_here(copied, tmp_path / "run")
    assert [path.name[:9] for path in checkpoint.found(tmp_path / "run" / "checkpoints")][-1] == f"{saved:09d}"
    assert not (tmp_path / "run" / "receipt.json").exists()
    finish()


def test_change_in_an_evaluation_is_seen_when_it_ends(copied: Config, monkeypatch: pytest.MonkeyPatch):
    """Of a run, whose last checkpoint is written by then; and of the stage."""
    held: list[Callable[..., None]] = []
    monkeypatch.setattr(stages, "_files", held)
    held.append(lambda: None)
    stage_module.alone(copied)
    stages.require_still()
    mapped(Path(copied.data.prepared) / NAME)
    with pytest.raises(UserError, match="data changed while"):
        stages.require_still()
