"""Saving in the background: the training waits for nothing but the copy, and hears of every failure."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from states import ORIGIN, Training, assert_equal, silent, snapshot
from warm import PATIENCE

from samebits.checkpoint import checkpoint
from samebits.checkpoint.checkpoint import found, newest
from samebits.checkpoint.saver import Saver
from samebits.config.settings import Checkpoint
from samebits.core.state import Snapshot

ONE = Checkpoint(every=1, keep=1, on_error="stop")


def saved(folder: Path, on_error: str = "stop", first: Callable[[], None] = lambda: None) -> Saver:
    """What has saved the first step and is done with it."""
    training = Training()
    training.step(1)
    saver = Saver(folder, ORIGIN, ONE.model_copy(update={"on_error": on_error}), first)
    saver.save(training.state.look(1))
    saver.wait()
    return saver


class Gate:
    """A stand-in for `write` that waits to be let through."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.open = threading.Semaphore(0)

    def __call__(self, snapshot: Snapshot, *rest: Any) -> Path:
        self.entered.append(snapshot.step)
        assert self.open.acquire(timeout=PATIENCE)
        return Path()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(checkpoint, "write", gate)
    yield gate
    gate.open.release(100)


def test_saving_waits_for_nothing_but_the_copy_and_the_save_before(gate: Gate, tmp_path: Path):
    training = Training()
    training.step(1)
    saver = Saver(tmp_path, ORIGIN, ONE, lambda: None)
    saver.save(training.state.look(1))  # returns, although nothing gets written
    training.step(1)
    second = threading.Thread(target=saver.save, args=(training.state.look(2),))
    second.start()
    second.join(0.2)
    assert second.is_alive() and gate.entered == [1], "two snapshots at once"
    gate.open.release()
    second.join(PATIENCE)
    assert not second.is_alive(), "it waits for its own write"
    gate.open.release()
    saver.wait()
    assert gate.entered == [1, 2]


def test_what_is_saved_is_the_state_when_save_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    training, free = Training(), threading.Event()
    training.step(2)
    original = checkpoint.write

    def later(*arguments: Any) -> Path:
        assert free.wait(PATIENCE)
        return original(*arguments)

    monkeypatch.setattr(checkpoint, "write", later)
    saver = Saver(tmp_path, ORIGIN, ONE, lambda: None)
    saver.save(training.state.look(2))
    training.step(3)
    free.set()
    saver.wait()
    there = newest(tmp_path, ORIGIN, silent)
    assert there
    assert_equal(there, snapshot(2))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("odd")])
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_error_in_the_background_is_told_once(
    error: Exception, on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*arguments: Any) -> Path:
        raise error

    monkeypatch.setattr(checkpoint, "write", fail)
    saver = saved(tmp_path, on_error)
    remedy = "Free some space" if isinstance(error, OSError) else "Mend that"
    then = f"{remedy}, and the same command begins with step 0" if on_error == "stop" else "The training goes on"
    message, failure = f"no checkpoint was written: {error}; there is none yet. {then}", saver.failure()
    assert str(failure) == (message if on_error == "stop" else "None")
    assert capsys.readouterr().err == ("" if on_error == "stop" else message + "\n")
    assert saver.failure() is None and capsys.readouterr().err == ""


def test_first_things_are_done_first_and_in_the_background(tmp_path: Path):
    """The rows of the record must be on the disk before a checkpoint that follows them."""
    seen: list[tuple[str, int]] = []

    def first() -> None:
        seen.append((threading.current_thread().name, len(found(tmp_path))))

    saved(tmp_path, first=first)
    assert seen == [("checkpoint", 0)] and len(found(tmp_path)) == 1


def test_first_things_that_fail_leave_no_checkpoint(tmp_path: Path):
    def first() -> None:
        raise OSError(errno.EIO, "Input/output error")

    assert "Input/output error" in str(saved(tmp_path, first=first).failure()) and found(tmp_path) == []
