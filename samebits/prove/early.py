"""Early parts of a run that have no room beside it: its ranks stop as for a preemption, until these are trained again.

Each process becomes its command again (`start.anew`). Before it loads the owner's code, rank 0 trains the parts again,
and the others wait. The proof is kept in rank 0's memory: what a kill takes from it is trained again at the run's end.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from signal import SIGTERM
from typing import Any

import torch.distributed as dist

from ..base.project import Project
from ..config.settings import Settings
from ..core.errors import Preempted, RunError
from ..core.lost import contacting, meeting
from ..core.place import rank_and_size
from ..guards import opened
from ..record.lock import RunLock
from ..record.names import RUN
from ..record.reading import read_record
from ..start import anew
from ..start.ranks import handling
from . import hosts
from .proof import Proof
from .segments import Segment

HERE = "ranks that have given back their memory"
_made: list[Proof] = []  # at most one


def prove(project: Project, config: Settings, out: Path) -> None:
    """Train the early parts of the run that has stopped in `out`, on rank 0; the others wait for that.

    A run that contradicts itself goes on until its record is open, and fails then: so the record can say it.

    Raises:
        RunError: on other ranks, where rank 0 failed.
        Preempted: SIGTERM came.
    """
    came: list[int] = []
    rank, size = rank_and_size()
    alone = _apart(rank, size, timedelta(seconds=config.parallel.timeout_seconds), lambda: bool(came))
    with handling(lambda number, frame: came.append(number), [SIGTERM]), alone, opened.unnoticed():
        if rank == 0:
            segments = [Segment(*each) for each in read_record(out, RUN).get("segments", [])]
            _made[:] = [Proof(project, config, out, size, segments, lambda: bool(came))]
            _prove(_made[0], out)
    if came:
        raise Preempted("stopped by SIGTERM before the run went on; the same command goes on")


def made() -> Proof | None:
    """The proof of the run that goes on here, if it has stopped for it."""
    return _made[0] if _made else None


def _prove(proof: Proof, out: Path) -> None:
    lock = RunLock(out)  # else another training could take the folder
    lock.acquire()
    try:
        proof.early(**anew.handed())
    finally:
        proof.close()
        lock.release()


@contextmanager
def _apart(rank: int, size: int, timeout: timedelta, stopped: Callable[[], bool]) -> Iterator[None]:
    """What follows rank 0 does alone, once all ranks have given back their memory, for which they wait so long."""
    if size == 1:
        yield
    elif rank == 0:
        store = _store(rank, size, timeout)
        while _here(store, 0) < size - 1:
            hosts.pause(stopped)
        with hosts.telling(store):
            yield
    else:
        yield
        try:
            _wait(_store(rank, size, timeout), stopped)
        except RunError as lost:
            if not isinstance(lost.__cause__, RuntimeError):
                raise
            # without torchrun it was the store of rank 0's process as it was before, which ended with it
            _wait(_store(rank, size, timeout), stopped)


def _wait(store: Any, stopped: Callable[[], bool]) -> None:
    _here(store, 1)
    hosts.wait(store, stopped)


@contacting
def _here(store: Any, more: int) -> int:
    return int(store.add(HERE, more))


_stores: list[Any] = []  # rank 0's serves the process group, too


@meeting
def _store(rank: int, size: int, timeout: timedelta) -> Any:
    """Where all ranks look; torchrun keeps its own from the start of the run on."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))  # type: ignore[attr-defined]
    _stores[:] = [store]
    return dist.PrefixStore(f"early {os.environ.get(anew.COUNT)}", store)  # type: ignore[attr-defined]
