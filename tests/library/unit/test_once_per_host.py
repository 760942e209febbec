"""One rank of each host checks the data, the others wait for it however long it takes; all get what it found."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.core import alike as module
from samebits.core.alike import once_per_host
from samebits.core.errors import RunError, UserError
from samebits.core.ranks import World


@dataclass
class Meeting:
    """Where ranks that are threads exchange values."""

    size: int
    values: dict[int, Any] = field(default_factory=dict)
    met: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = [self.values[each] for each in range(self.size)]
        self.met += rank == 0
        self.barrier.wait()
        return found


@dataclass(frozen=True, kw_only=True)
class Rank(World):
    """A rank that is a thread."""

    meeting: Meeting

    def gather(self, value: Any) -> list[Any]:
        """As that of processes."""
        return self.meeting.exchange(self.rank, value)

    def total(self, *numbers: Any) -> list[int]:
        """As that of processes."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]


def together(work: Callable[[int], Any], requested: list[str]) -> tuple[list[Any], Meeting]:
    """What each of the ranks gets, or its failure; `requested` by rank."""
    meeting = Meeting(len(requested))

    def run(rank: int) -> Any:
        world = Rank(rank, len(requested), torch.device("cpu"), meeting=meeting)
        try:
            return once_per_host(world, lambda: work(rank), requested[rank])
        except RunError as failure:
            return str(failure)

    with ThreadPoolExecutor(len(requested)) as pool:
        return list(pool.map(run, range(len(requested)))), meeting


def test_one_rank_works_for_all_that_are_asked_the_same():
    worked: list[int] = []

    def work(rank: int) -> str:
        worked.append(rank)
        return f"of {rank}"

    found, _ = together(work, ["one", "one", "other", "one", "other"])
    assert found == ["of 0", "of 0", "of 2", "of 0", "of 2"] and sorted(worked) == [0, 2]


def test_one_rank_alone_does_its_own_work():
    assert once_per_host(World(0, 1, torch.device("cpu")), lambda: "done", "asked") == "done"
    with pytest.raises(UserError, match=r"^nowhere: No such file or directory: restore it, or name another place$"):
        once_per_host(World(0, 1, torch.device("cpu")), Path("nowhere").read_bytes, "asked")


def altered(rank: int) -> str:
    """The data of rank 0's host are altered, rank 2 has none, the others' are whole."""
    if rank == 2:
        Path("nowhere").read_bytes()
    if rank == 0:
        raise UserError("data: altered")
    return "whole"


# What each rank is asked -> what all are told.
FAILURES = {
    "a a a": "data: altered",
    "a b a": "data: altered (met by rank 0 of 3)",
    "a b c b": "data: altered (met by rank 0, 2 of 4)",
    "a a b": "data: altered",  # all that tried
}


@pytest.mark.parametrize("requested", FAILURES)
def test_failure_is_that_of_all_ranks(requested: str):
    ranks = requested.split()
    assert together(altered, ranks)[0] == [FAILURES[requested]] * len(ranks)


def test_long_work_keeps_the_others_company(monkeypatch: pytest.MonkeyPatch):
    """No collective waits for its end, so that none runs into parallel.timeout_seconds."""
    monkeypatch.setattr(module, "HEARTBEAT", 0.001)
    many = threading.Event()

    class Counted(Meeting):
        def exchange(self, rank: int, value: Any) -> list[Any]:
            if self.met > 50:
                many.set()
            return super().exchange(rank, value)

    monkeypatch.setattr(f"{__name__}.Meeting", Counted)
    found, meeting = together(lambda rank: many.wait(60), ["same"] * 3)
    assert found == [True] * 3 and meeting.met > 50
