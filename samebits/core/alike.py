"""Work that may fail on one rank: then all fail alike, and none is left waiting."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar, cast

from .errors import RunError, of_system
from .ranks import World

HEARTBEAT = 1.0  # seconds between two words of ranks that wait for a long work of one of them
T = TypeVar("T")


def together(world: World, work: Callable[[], T]) -> T:
    """Do work on every rank that may fail on one of them. Then all fail alike, and none is left waiting.

    Raises:
        RunError: that of the first rank that met one, saying which ranks did where not all of them.
    """
    result, failure = _outcome(work)
    fail_alike(world, failure)
    return cast(T, result)


def once_per_host(world: World, work: Callable[[], T], requested: str) -> T:
    """What `work` returns, which one rank of each host does for all that are `requested` the same there.

    It may take longer than `parallel.timeout_seconds`: meanwhile the ranks tell each other that they are there.

    Raises:
        RunError: that of the first rank that met one, on all ranks alike.
    """
    if world.size == 1:
        return together(world, work)
    # a rank of torchrun knows its launcher's number: two of these on one host may see different disks
    places = world.gather((socket.gethostname(), os.environ.get("GROUP_RANK"), str(Path.cwd()), requested))
    first = places.index(places[world.rank])
    doing: list[Future[tuple[T | None, RunError | None]]] = []
    with ThreadPoolExecutor(1) as pool:
        if first == world.rank:
            doing.append(pool.submit(_outcome, work))
        while any(world.total(len(wait(doing, HEARTBEAT).not_done))):
            pass
    result, failure = doing[0].result() if doing else (None, None)
    fail_alike(world, failure, bool(doing))
    return cast(T, world.gather(result)[first])


def fail_alike(world: World, failure: RunError | None, tried: bool = True) -> None:
    """Raise the first rank's failure on every rank, saying whose it is where others that tried met none."""
    met = world.gather((failure, tried))
    met_by = {rank: failure for rank, (failure, _) in enumerate(met) if failure}
    if met_by:
        first = next(iter(met_by.values()))
        if len(met_by) == sum(tried for _, tried in met):
            raise first
        raise type(first)(f"{first} (met by rank {', '.join(map(str, met_by))} of {world.size})")


def _outcome(work: Callable[[], T]) -> tuple[T | None, RunError | None]:
    """What work returns, or the failure that a user can cause."""
    try:
        return work(), None
    except RunError as failure:
        return None, failure
    except OSError as error:
        if not (failed := of_system(error)):
            raise
        return None, failed
