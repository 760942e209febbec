"""Where ranks lie on several hosts, rank 0's ends the run and proves it, and those of the others wait for that.

Else torchrun would end on the others, some minutes after their ranks; nor could it start those of all hosts again.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ..core import ranks
from ..core.errors import Disagreement, NonFinite, Preempted, RunError, UserError, of_system
from ..core.lost import contacting
from ..core.ranks import World

KEY = "the run has ended"
KINDS = {kind.exit_code: kind for kind in (RunError, UserError, NonFinite, Disagreement, Preempted)}
PAUSE, LAST = 0.2, 1.5  # seconds between two looks; by which torchrun on rank 0's host, where the store is, ends last


@contextmanager
def together(world: World, stopped: Callable[[], bool], everywhere: bool = False) -> Iterator[None]:
    """Leave the process group, and have rank 0 alone do what follows: no collective takes so long.

    Ranks of other hosts, or those `everywhere`, wait, and fail alike. `stopped` says whether SIGTERM came to this one.

    Raises:
        RunError: that of rank 0; or it is gone.
        Preempted: SIGTERM came.
    """
    if not dist.is_initialized():
        yield
        return
    store = dist.distributed_c10d._get_default_store()
    ranks.leave()  # now, for NCCL wants all to leave at a time
    if world.is_main:
        with telling(store):
            yield
    else:
        yield
        if everywhere or os.environ.get("GROUP_RANK", "0") != "0":  # torchrun's number of a host
            wait(store, stopped)


@contextmanager
def telling(store: Any) -> Iterator[None]:
    """Tell those who `wait` how what follows has ended."""
    failure: RunError | None = None
    try:
        yield
    except BaseException as error:
        failure = _alike(error)
        raise
    finally:
        with suppress(RuntimeError):  # nobody is left to hear it
            store.set(KEY, json.dumps(failure and [failure.exit_code, str(failure)]))
            if not failure and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
                time.sleep(LAST)


@contacting
def _ended(store: Any) -> bool:
    return bool(store.check([KEY]))


@contacting
def _failure(store: Any) -> RunError | None:
    failed = json.loads(store.get(KEY))
    return KINDS[failed[0]](failed[1]) if failed else None


def pause(stopped: Callable[[], bool]) -> None:
    """Wait a moment.

    Raises:
        Preempted: SIGTERM came.
    """
    if stopped():
        raise Preempted("stopped by SIGTERM while rank 0 proves the run; the same command goes on from there")
    time.sleep(PAUSE)


def wait(store: Any, stopped: Callable[[], bool]) -> None:
    """Wait for what rank 0 tells.

    Raises:
        RunError: that of rank 0; or it is gone.
        Preempted: SIGTERM came.
    """
    while not _ended(store):
        pause(stopped)
    if failure := _failure(store):
        raise failure


def _alike(failure: BaseException) -> RunError:
    """What ranks of other hosts end with where rank 0 fails so."""
    if isinstance(failure, RunError):
        return failure
    return (of_system(failure) if isinstance(failure, OSError) else None) or RunError(f"rank 0 failed: {failure!r}")
