"""Samples as pure functions of the seed, and a loader that gives the same ones on any ranks and workers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from . import flags
from .errors import RunError
from .generators import seeded
from .options import Determinism, Options
from .plan import Indexed as Indexed
from .plan import Key
from .plan import Plan as Plan
from .plan import planned as planned
from .ranks import World
from .seeds import derive

AHEAD = 2048  # keys that are computed at once, in a millisecond


class Seeded(Dataset[Any]):
    """A dataset whose items are pure functions of the root seed and of their key, even if its transforms draw.

    A key is what the seeds of `purpose` are derived from; the index in the dataset is its last number. Each item is
    made with one thread, as in a loader's worker: more of them would add a large tensor in another order.

    Once the items of a batch are made, `check` may refuse them.
    """

    def __init__(
        self, dataset: Indexed, seed: int, purpose: str = "sample", check: Callable[[], object] | None = None
    ) -> None:
        self.dataset, self.seed, self.purpose, self.check = dataset, seed, purpose, check

    def __getitem__(self, key: tuple[int, ...]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, ...]]) -> list[Any]:
        """The items of a batch, for which a DataLoader asks at once."""
        threads = torch.get_num_threads()
        if threads != 1:
            torch.set_num_threads(1)
        try:
            items = [
                seeded(derive(self.seed, self.purpose, *key), partial(self.dataset.__getitem__, key[-1]))
                for key in keys
            ]
        finally:
            if threads != 1:
                torch.set_num_threads(threads)
        if self.check:
            self.check()
        return items


class MicroBatches(Sampler[list[Key]]):
    """The keys of one micro-batch after another: this rank's, of every step from `start` to `stop`."""

    def __init__(self, plan: Plan, mine: Sequence[int], start: int, stop: int) -> None:
        self.plan, self.mine, self.start, self.stop = plan, mine, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * len(self.mine)

    def __iter__(self) -> Iterator[list[Key]]:
        ahead = max(1, AHEAD // (len(self.mine) * self.plan.micro_batch_size))
        for first in range(self.start, self.stop, ahead):
            yield from self.plan.keys_of(range(first, min(first + ahead, self.stop)), self.mine)


def loader(
    dataset: Indexed,
    plan: Plan,
    options: Options,
    world: World,
    mine: Sequence[int],
    start: int,
    stop: int,
    begin_worker: Callable[[], object] | None = None,
    check: Callable[[], object] | None = None,
) -> DataLoader[Any]:
    """A DataLoader that yields one of these micro-batches per item; the worker count changes its speed only.

    Each worker calls `begin_worker` first. Whoever makes the samples of a micro-batch calls `check` after it.
    """
    return DataLoader(
        Seeded(dataset, options.seed, check=check),
        batch_sampler=MicroBatches(plan, mine, start, stop),
        num_workers=options.loader.workers,
        timeout=options.parallel.timeout_seconds if options.loader.workers else 0,  # a worker may hang, too
        worker_init_fn=partial(_begin_worker, options.determinism, begin_worker),
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # without it the loader would draw from the global generator
    )


def batches(loader: DataLoader[Any], world: World) -> Iterator[Any]:
    """What a loader yields; a worker's failure keeps its plain line, to which torch adds the worker's traceback."""
    try:
        yield from loader
    except RunError as failure:  # of this rank's own samples
        message = str(failure).rpartition(f"{type(failure).__name__}: ")[2].strip()
        raise type(failure)(message, local=world.size > 1) from None
    except RuntimeError as error:
        if "DataLoader timed out" not in str(error):
            raise
        raise RunError(
            f"a loader worker gave nothing for {loader.timeout:g} s; the same command goes on from the last checkpoint "
            f"(parallel.timeout_seconds gives samples more time)",
            local=world.size > 1,
        ) from None


def _begin_worker(determinism: Determinism, begin: Callable[[], object] | None, worker: int) -> None:
    if begin:
        begin()
    flags.apply(determinism)
