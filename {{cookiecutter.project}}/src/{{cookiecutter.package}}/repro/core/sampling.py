"""The samples of each micro-batch of each step, and a loader that gives the same ones on any ranks and workers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..address import loaded
from ..config.settings import Determinism, Settings
from ..environment import portable
from ..guards import opened
from . import flags
from .errors import Failure, Refused
from .generators import seeded
from .order import Permutation
from .ranks import World
from .seeds import derive

Key = tuple[int, int]  # (epoch, index of the sample in the dataset)
MOST = 10**9 - 1  # steps: names of checkpoints have nine digits
AHEAD = 2048  # keys that are computed at once, in a millisecond


@runtime_checkable
class Indexed(Protocol):
    """A dataset: its length, and its items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Plan:
    """The samples of (step, micro-batch), for any step at once.

    Epochs are laid end to end and cut into global batches: a batch may straddle two epochs, nothing is
    dropped, and every sample is seen exactly once per epoch.
    """

    def __init__(self, samples: int, global_batch: int, micro_batches: int, seed: int) -> None:
        self.samples, self.global_batch, self.micro_batches = samples, global_batch, micro_batches
        self.micro_batch_size = global_batch // micro_batches
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

    def keys(self, step: int, micro_batch: int) -> list[Key]:
        """The samples of one micro-batch."""
        first = step * self.global_batch + micro_batch * self.micro_batch_size
        places = (divmod(position, self.samples) for position in range(first, first + self.micro_batch_size))
        return [(epoch, self._order(epoch)[position]) for epoch, position in places]

    def keys_of(self, steps: range, micro_batches: Sequence[int]) -> list[list[Key]]:
        """The samples of each of these micro-batches of each of these steps, computed all at once."""
        size = self.micro_batch_size
        begins = np.add.outer(np.arange(steps.start, steps.stop) * self.global_batch, np.array(micro_batches) * size)
        positions = np.add.outer(begins, np.arange(size)).reshape(-1)  # int64 reaches far beyond any training
        epochs, places = np.divmod(positions, self.samples)
        items = np.empty(len(positions), dtype=np.uint64)
        for epoch in np.unique(epochs):
            of = epochs == epoch
            items[of] = self._order(int(epoch)).items(places[of])
        keys = list(zip(epochs.tolist(), items.tolist(), strict=True))
        return [keys[first : first + size] for first in range(0, len(keys), size)]


def planned(dataset: Indexed, settings: Settings, epochs: int | None, steps: int | None) -> tuple[Plan, int]:
    """The plan of a training of so many epochs or steps, and its number of steps.

    Raises:
        Refused: there is nothing to plan, too much, or no dataset.
    """
    if not isinstance(dataset, Indexed):
        raise Refused(
            f"run.steps(): a {type(dataset).__name__} given, a dataset with __len__ and __getitem__ wanted: the run "
            f"makes its own loader"
        )
    if (epochs is None) == (steps is None):
        raise Refused(f"run.steps(): epochs={epochs} and steps={steps} given, one of the two wanted")
    plan = Plan(len(dataset), settings.parallel.global_batch, settings.parallel.micro_batches, settings.seed)
    stop = plan.steps(epochs) if epochs is not None else steps or 0
    if stop < 1 or len(dataset) < 1:
        told = f"{stop} steps of a dataset of {len(dataset)} samples"
        raise Refused(f"run.steps(): {told}, at least one of each wanted")
    if stop > MOST:
        raise Refused(f"run.steps(): {stop} steps, at most {MOST} wanted: ask for fewer epochs, or a larger batch")
    return plan, stop


class Seeded(Dataset[Any]):
    """A dataset whose items are pure functions of the root seed and of their key, even if its transforms draw.

    A key is what the seeds of `purpose` are derived from; the index in the dataset is its last number. Each item is
    made with one thread, as in a loader's worker: more of them would add a large tensor in another order.
    """

    def __init__(self, dataset: Indexed, seed: int, purpose: str = "sample") -> None:
        self.dataset, self.seed, self.purpose = dataset, seed, purpose

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
        opened.require_known()
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
    dataset: Indexed, plan: Plan, settings: Settings, world: World, mine: Sequence[int], start: int, stop: int
) -> DataLoader[Any]:
    """A DataLoader that yields one of these micro-batches per item; the worker count changes its speed only."""
    return DataLoader(
        Seeded(dataset, settings.seed),
        batch_sampler=MicroBatches(plan, mine, start, stop),
        num_workers=settings.loader.workers,
        timeout=settings.parallel.timeout_seconds if settings.loader.workers else 0,  # a worker may hang, too
        worker_init_fn=partial(_begin_worker, settings.determinism, loaded.begun()),
        pin_memory=world.device.type == "cuda",
        generator=torch.Generator(),  # without it the loader would draw from the global generator
    )


def batches(loader: DataLoader[Any], world: World) -> Iterator[Any]:
    """What a loader yields; a worker's failure keeps its plain line, to which torch adds the worker's traceback."""
    try:
        yield from loader
    except Failure as failure:  # of this rank's own samples
        told = str(failure).rpartition(f"{type(failure).__name__}: ")[2].strip()
        raise type(failure)(told, local=world.size > 1) from None
    except RuntimeError as error:
        if "DataLoader timed out" not in str(error):
            raise
        raise Failure(
            f"a loader worker gave nothing for {loader.timeout:g} s; the same command goes on from the last checkpoint "
            f"(parallel.timeout_seconds gives samples more time)",
            local=world.size > 1,
        ) from None


def _begin_worker(determinism: Determinism, begun: Mapping[Path, Mapping[str, str]], worker: int) -> None:
    loaded.require_same(begun)
    flags.apply(determinism)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch as the DataLoader collates it (tensors in nested lists, tuples and mappings), on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named one
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch  # text, say


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of such a batch, in order.

    Raises:
        Refused: it holds none.
    """
    found = list(portable.tensors_in(batch))
    if not found:
        raise Refused("a batch holds no tensor: let the dataset's items hold tensors, arrays or numbers")
    return found
