"""Ranks of other hosts wait until rank 0's has proved the run, and end as rank 0 does."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samebits.core import ranks
from samebits.core.errors import Preempted, RunError
from samebits.core.ranks import World
from samebits.prove import hosts
from samebits.prove.proof import Contradiction, again_in_vain
from samebits.record import names
from samebits.start.trainings import Ended

HostsEnd = Callable[..., tuple[str | None, bool]]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> HostsEnd:
    """A function: how rank 1 of another host ends while rank 0 does `work`, and whether it waited for rank 0."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "leave", lambda: None)
    monkeypatch.setattr(hosts, "PAUSE", 0.001)
    monkeypatch.setenv("GROUP_RANK", "1")

    def ends(
        work: Callable[[], None], stopped: Callable[[], bool] = lambda: False, everywhere: bool = False
    ) -> tuple[str | None, bool]:
        began, worked = threading.Event(), threading.Event()
        store = dist.HashStore()  # type: ignore[attr-defined]
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

        def main() -> None:
            try:
                with hosts.together(World(0, 2, torch.device("cpu")), lambda: False):
                    assert began.wait(60)
                    worked.set()
                    work()
            except BaseException:  # it is what the other one is to hear of
                pass

        thread = threading.Thread(target=main)
        thread.start()
        try:
            with hosts.together(World(1, 2, torch.device("cpu")), lambda: began.set() or stopped(), everywhere):
                pass
            return None, worked.is_set()
        except RunError as failure:
            return f"{type(failure).__name__}: {failure}", worked.is_set()
        finally:
            began.set()
            thread.join()

    return ends


def fails(error: BaseException) -> Callable[[], None]:
    """Work that raises it."""

    def work() -> None:
        raise error

    return work


def test_rank_of_another_host_ends_well_once_rank_0_has(other: HostsEnd):
    assert other(lambda: None) == (None, True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Contradiction("step 0: loss"), "RunError: step 0: loss"),
        (Ended(["dvc", "repro"], 2, ["no"]), "RunError: dvc repro\nended with 2:\nno"),
        (Preempted("stopped"), "Preempted: stopped"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "RunError: [Errno 28] No space left on device: free some"),
        (ValueError("unforeseen"), "RunError: rank 0 failed: ValueError('unforeseen')"),
    ],
)
def test_rank_of_another_host_fails_as_rank_0_does(error: BaseException, said: str, other: HostsEnd):
    ended, waited = other(fails(error))
    assert ended and ended.startswith(said) and waited


def test_rank_of_another_host_heeds_sigterm_while_it_waits(other: HostsEnd):
    ended, _ = other(lambda: None, stopped=lambda: True)
    assert ended and ended.startswith("Preempted: stopped by SIGTERM while rank 0")


def test_rank_of_rank_0s_host_waits_where_all_do(other: HostsEnd, monkeypatch: pytest.MonkeyPatch):
    """It leaves its memory, and its GPU, to what is trained again there; but torchrun would end rank 0 if it failed."""
    monkeypatch.setenv("GROUP_RANK", "0")
    assert other(lambda: None) == (None, False)
    assert other(fails(Contradiction("step 0")), everywhere=True) == ("RunError: step 0", True)


@pytest.mark.parametrize(
    ("count", "contradicts", "refused"), [("0", True, False), ("1", False, False), ("1", True, True)]
)
def test_run_that_contradicts_itself_is_not_started_again_by_torchrun(
    count: str, contradicts: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    if contradicts:
        (tmp_path / names.CONTRADICTION).touch()
    assert (again_in_vain(tmp_path) is not None) == refused
