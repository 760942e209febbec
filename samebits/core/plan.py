"""The samples of each micro-batch of each step, for any step at once."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from .errors import UserError
from .options import Options
from .order import Permutation
from .orders import Order, Ordered
from .seeds import derive

# (epoch, index of the sample in the dataset); of an order that may repeat a sample, (epoch, its place there, index)
Key = tuple[int, ...]
EPOCHS = 4  # whose orders are kept
MOST = 10**9 - 1  # steps: names of checkpoints have nine digits


@runtime_checkable
class Indexed(Protocol):
    """A dataset: its length, and its items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


_epoch: int | None = None  # of the sample that is being made in this process


def item_epoch() -> int:
    """Return the epoch, counted from 0, for which a sample, a batch or an order is being made; 0 in an evaluation.

    For `__getitem__`, `collate` and an order of one's own, such as to augment more from epoch to epoch: the loop cannot
    tell a loader worker. A batch has the epoch of its first sample.

    Raises:
        UserError: nothing of the kind is being made.
    """
    if _epoch is None:
        raise UserError("samebits.item_epoch(): no sample is being made; in the loop, step.epochs counts epochs")
    return _epoch


@contextmanager
def in_epoch(epoch: int) -> Iterator[None]:
    """Let `item_epoch` return this number."""
    global _epoch
    before, _epoch = _epoch, epoch
    try:
        yield
    finally:
        _epoch = before


class Plan:
    """The samples of (step, micro-batch), for any step at once.

    Epochs are laid end to end and cut into global batches: a batch may straddle two epochs, nothing is
    dropped, and every sample is seen exactly once per epoch.
    """

    def __init__(
        self, samples: int, global_batch: int, micro_batches: int, seed: int, order: Order = Permutation
    ) -> None:
        self.samples, self.global_batch, self.micro_batches = samples, global_batch, micro_batches
        self.micro_batch_size = global_batch // micro_batches
        self._seed, self._made_by = seed, order
        self.order = lru_cache(EPOCHS)(self.make)

    def make(self, epoch: int) -> Ordered:
        """The order of an epoch, made anew; `order` keeps some."""
        with in_epoch(epoch):
            return self._made_by(self.samples, derive(self._seed, "order", epoch))

    def steps(self, epochs: int) -> int:
        """The number of steps after which `epochs` epochs have been seen."""
        return math.ceil(epochs * self.samples / self.global_batch)

    def epoch(self, step: int) -> float:
        """How many epochs have been seen once `step` steps are done."""
        return step * self.global_batch / self.samples

    def next_end(self, step: int) -> int:
        """The number of steps after which the first epoch is done that step `step` does not complete."""
        return self.steps(step * self.global_batch // self.samples + 1)

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Whether `step` completes an epoch whose number, counted from 1, is a multiple of `every`."""
        before, after = (n * self.global_batch // self.samples // every for n in (step, step + 1))
        return after > before

    def keys(self, step: int, micro_batch: int) -> list[Key]:
        """The samples of one micro-batch."""
        first = step * self.global_batch + micro_batch * self.micro_batch_size
        places = [divmod(position, self.samples) for position in range(first, first + self.micro_batch_size)]
        if self._made_by is not Permutation:
            return [(*place, int(self._items(place[0], np.array(place[1:]))[0])) for place in places]
        return [(epoch, self.order(epoch)[place]) for epoch, place in places]  # type: ignore[index]

    def _items(self, epoch: int, places: NDArray[np.int64]) -> NDArray[Any]:
        """The samples at places of an epoch.

        Raises:
            UserError: an order of the owner's gives none of the dataset.
        """
        with in_epoch(epoch):
            items = self.order(epoch).items(places)
        if self._made_by is not Permutation:
            items = np.asarray(items)
            if items.shape != places.shape or items.dtype.kind not in "iu" or not _inside(items, self.samples):
                raise UserError(
                    f"run.steps(order=...): items() gave {items.dtype} of shape {items.shape}, {places.size} whole "
                    f"numbers from 0 to {self.samples - 1} wanted, the samples at {places.size} positions"
                )
        return items

    def keys_of(self, steps: range, micro_batches: Sequence[int]) -> list[list[Key]]:
        """The samples of each of these micro-batches of each of these steps, computed all at once."""
        size = self.micro_batch_size
        begins = np.add.outer(np.arange(steps.start, steps.stop) * self.global_batch, np.array(micro_batches) * size)
        positions = np.add.outer(begins, np.arange(size)).reshape(-1)  # int64 reaches far beyond any training
        epochs, places = np.divmod(positions, self.samples)
        items = np.empty(len(positions), dtype=np.uint64)
        for epoch in np.unique(epochs):
            of = epochs == epoch
            items[of] = self._items(int(epoch), places[of])
        placed = [places.tolist()] if self._made_by is not Permutation else []
        keys = list(zip(epochs.tolist(), *placed, items.tolist(), strict=True))
        return [keys[first : first + size] for first in range(0, len(keys), size)]


def _inside(items: NDArray[Any], samples: int) -> bool:
    return not items.size or bool(0 <= items.min() <= items.max() < samples)


def planned(
    dataset: Indexed, options: Options, epochs: int | None, steps: int | None, order: Order | None = None
) -> tuple[Plan, int]:
    """The plan of a training of so many epochs or steps, and its number of steps.

    Raises:
        UserError: there is nothing to plan, too much, or no dataset.
    """
    stream = isinstance(dataset, IterableDataset)
    if stream or not isinstance(dataset, Indexed):
        why = "a stream has no samples to order; let prepare write an index of it" if stream else ""
        raise UserError(
            f"run.steps(): a {type(dataset).__name__} given, a dataset with __len__ and __getitem__ wanted: "
            f"{why or 'the run makes its own loader'}"
        )
    if (epochs is None) == (steps is None):
        raise UserError(f"run.steps(): epochs={epochs} and steps={steps} given, one of the two wanted")
    cut = options.parallel.global_batch, options.parallel.micro_batches
    plan = Plan(len(dataset), *cut, options.seed, order or Permutation)
    stop = plan.steps(epochs) if epochs is not None else steps or 0
    if stop < 1 or len(dataset) < 1:
        message = f"{stop} steps of a dataset of {len(dataset)} samples"
        raise UserError(f"run.steps(): {message}, at least one of each wanted")
    if stop > MOST:
        raise UserError(f"run.steps(): {stop} steps, at most {MOST} wanted: ask for fewer epochs, or a larger batch")
    return plan, stop
