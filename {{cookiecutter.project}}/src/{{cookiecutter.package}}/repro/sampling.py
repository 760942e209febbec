"""Which samples make up each shard of each step, and a loader that reads them the same way anywhere."""

import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from .determinism import apply, seed_everything
from .order import Permutation
from .seeds import derive
from .settings import Determinism, Settings
from .world import World

Key = tuple[int, int]  # (epoch, index of the sample in the dataset)


class Indexed(Protocol):
    """What a dataset must offer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Plan:
    """The samples of (step, shard), for any step at once.

    Epochs are laid end to end and cut into global batches: a batch may straddle two epochs, nothing is
    dropped, and every sample is seen exactly once per epoch.
    """

    def __init__(self, samples: int, global_batch: int, shards: int, seed: int) -> None:
        self.samples, self.global_batch, self.shards = samples, global_batch, shards
        self.shard_size = global_batch // shards
        self._order = cache(lambda epoch: Permutation(samples, derive(seed, "order", epoch)))

    def steps(self, epochs: int) -> int:
        """The number of steps after which `epochs` epochs have been seen."""
        return math.ceil(epochs * self.samples / self.global_batch)

    def epoch(self, step: int) -> float:
        """How many epochs have been seen once `step` steps are done."""
        return step * self.global_batch / self.samples

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Whether `step` completes an epoch whose number, counted from 1, is a multiple of `every`."""
        before, after = (n * self.global_batch // self.samples // every for n in (step, step + 1))
        return after > before

    def keys(self, step: int, shard: int) -> list[Key]:
        """The samples of one shard."""
        first = step * self.global_batch + shard * self.shard_size
        places = (divmod(position, self.samples) for position in range(first, first + self.shard_size))
        return [(epoch, self._order(epoch)[position]) for epoch, position in places]

    def mine(self, world: World) -> range:
        """The shards that a rank runs, one after another."""
        return range(self.shards * world.rank // world.size, self.shards * (world.rank + 1) // world.size)


class Seeded(Dataset[Any]):
    """A dataset whose item is a pure function of (root seed, epoch, index), whatever its transforms draw."""

    def __init__(self, dataset: Indexed, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        seed_everything(derive(self.seed, "sample", epoch, index))
        return self.dataset[index]


class Shards(Sampler[list[Key]]):
    """The keys of one shard after another: this rank's, of every step from `start` to `stop`."""

    def __init__(self, plan: Plan, mine: Sequence[int], start: int, stop: int) -> None:
        self.plan, self.mine, self.start, self.stop = plan, mine, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * len(self.mine)

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.stop):
            for shard in self.mine:
                yield self.plan.keys(step, shard)


def loader(dataset: Indexed, plan: Plan, settings: Settings, world: World, start: int, stop: int) -> DataLoader[Any]:
    """A DataLoader that yields one shard per item; the worker count changes its speed only."""

    return DataLoader(
        Seeded(dataset, settings.seed),
        batch_sampler=Shards(plan, plan.mine(world), start, stop),
        num_workers=settings.loader.workers,
        worker_init_fn=partial(_set_switches, settings.determinism),
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # else starting the loader would draw from the global generator
    )


def _set_switches(determinism: Determinism, worker: int) -> None:
    apply(determinism)
