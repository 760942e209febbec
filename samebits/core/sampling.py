"""Samples as pure functions of the seed, and a loader that gives the same ones on any ranks and workers."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from . import flags
from .errors import RunError, UserError
from .generators import own_generators, seed_own, seeded
from .options import Determinism, Options
from .plan import Indexed as Indexed
from .plan import Key as Key
from .plan import Plan as Plan
from .plan import planned as planned
from .ranks import World
from .repeated import prints, require_repeated
from .seeds import derive, seed_everything

AHEAD = 2048  # keys that are computed at once, in a millisecond


class Items(list[Any]):
    """The items of a batch; `key` is that of the first one."""

    key: tuple[int, ...]


class Seeded(Dataset[Any]):
    """A dataset whose items are pure functions of the root seed and of their key, even if its transforms draw.

    Seeds are derived from a key; the index in the dataset is its last number, and `PURPOSES` says what they are for.
    Each item is made with one thread, as in a loader's worker: more of them would add a large tensor in another order.

    Generators of its own are seeded, too. Where it is `tried`, the items of the first batch are made twice: one that
    depends on the items before is refused.

    Once the items of a batch are made, `check` may refuse them.
    """

    def __init__(
        self, dataset: Indexed, seed: int, check: Callable[[], object] | None = None, tried: bool = False
    ) -> None:
        self.dataset, self.seed, self.check, self._tried = dataset, seed, check, tried
        self._own = own_generators([dataset])

    def __getitem__(self, key: tuple[int, ...]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, ...]]) -> Items:
        """The items of a batch, for which a DataLoader asks at once."""
        with _one_thread():
            if self._tried:
                self._tried = False
                items = self._twice(keys) if getattr(get_worker_info(), "id", 0) == 0 else self._made(keys)
            else:
                items = self._made(keys)
        items.key = keys[0]
        if self.check:
            self.check()
        return items

    def _made(self, keys: Sequence[tuple[int, ...]]) -> Items:
        return Items(seeded(self._seed(key), partial(self.dataset.__getitem__, key[-1]), self._own) for key in keys)

    def _seed(self, key: tuple[int, ...]) -> int:
        return derive(self.seed, PURPOSES[len(key)][0], *key)

    def _twice(self, keys: Sequence[tuple[int, ...]]) -> Items:
        """The items as `_made` makes them, after all were made in reverse order.

        Raises:
            UserError: one is another one then.
        """
        first = [self._print(key)[1] for key in reversed(keys)]
        if len(own := own_generators([self.dataset])) > len(self._own):  # some are made with the first item
            self._own = own
            first = [self._print(key)[1] for key in reversed(keys)]
        items = Items()
        for key, once in zip(keys, reversed(first), strict=True):
            item, again = self._print(key)
            require_repeated(key[-1], once, again)
            items.append(item)
        return items

    def _print(self, key: tuple[int, ...]) -> tuple[Any, dict[str, str]]:
        """An item, all generators seeded, and what can be compared with another one."""
        seed_everything(self._seed(key))
        seed_own(self._own, self._seed(key))
        item = self.dataset[key[-1]]
        return item, prints(item, self._own)


class Collated:
    """Makes a batch of items: by torch's `default_collate`, or by a function of the owner's, which may draw."""

    def __init__(self, samples: Seeded, collate: Callable[[list[Any]], Any] | None) -> None:
        self.samples, self.collate = samples, collate
        self._own = own_generators([collate])

    def __call__(self, items: list[Any]) -> Any:
        """The batch.

        Raises:
            UserError: torch cannot make one of these items.
        """
        samples = self.samples
        assert isinstance(items, Items)
        if not self.collate:
            try:
                return default_collate([*items])
            except (RuntimeError, TypeError, KeyError) as error:
                said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
                if isinstance(error, RuntimeError) and not UNEQUAL.search(said):
                    raise
                raise UserError(
                    f"items of the dataset cannot be stacked to a batch: {said[:200]}. Give run.steps and "
                    f"samebits.sums collate=..., a function that makes a batch of a list of items, such as by padding"
                ) from None
        seed = derive(samples.seed, PURPOSES[len(items.key)][1], *items.key)
        with _one_thread():
            batch = seeded(seed, partial(self.collate, [*items]), self._own)
        if samples.check:
            samples.check()
        return batch


UNEQUAL = re.compile("equal size|resize storage|dtype")  # in what torch says of items of several shapes or types
# What the seeds of a key of so many numbers are for: an item, and a batch of which it is the first.
PURPOSES = {
    1: ("test sample", "test collation"),
    2: ("sample", "collation"),
    3: ("placed sample", "placed collation"),
}


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


class MicroBatches(Sampler[list[Any]]):
    """The keys of one micro-batch after another: this rank's, of every step from `start` to `stop`."""

    def __init__(self, plan: Plan, mine: Sequence[int], start: int, stop: int) -> None:
        self.plan, self.mine, self.start, self.stop = plan, mine, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * len(self.mine)

    def __iter__(self) -> Iterator[list[Any]]:
        ahead = max(1, AHEAD // (len(self.mine) * self.plan.micro_batch_size))
        for first in range(self.start, self.stop, ahead):
            yield from self.plan.keys_of(range(first, min(first + ahead, self.stop)), self.mine)


class Slices(Sampler[list[Any]]):
    """The keys of each of some batches of at most `size` samples, into which a dataset is cut."""

    def __init__(self, samples: int, size: int, numbers: range) -> None:
        self.samples, self.size, self.numbers = samples, size, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[list[Any]]:
        for number in self.numbers:
            yield [(index,) for index in range(self.samples)[number * self.size : (number + 1) * self.size]]


@dataclass(frozen=True)
class Loading:
    """How samples are loaded, by a training or an evaluation.

    Attributes:
        begin_worker: is called by each worker first.
        settle: is called before workers are forked; on return no other thread of this process is at work.
        check: may refuse the samples of a batch, where they were made.
        collate: makes a batch of a list of items; without it torch's `default_collate` does.
    """

    options: Options
    world: World
    begin_worker: Callable[[], object] | None = None
    check: Callable[[], object] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    settle: Callable[[], object] = lambda: None

    def loader(self, dataset: Indexed, keys: MicroBatches | Slices) -> DataLoader[Any]:
        """A DataLoader that yields a batch for each list of keys; the worker count changes its speed only."""
        options = self.options
        samples = Seeded(dataset, options.seed, self.check, isinstance(keys, MicroBatches))
        workers = min(options.loader.workers, len(keys))
        return DataLoader(
            samples,
            batch_sampler=keys,
            num_workers=workers,
            collate_fn=Collated(samples, self.collate),
            timeout=options.parallel.timeout_seconds if workers else 0,  # a worker may hang, too
            worker_init_fn=partial(_begin_worker, options.determinism, self.begin_worker),
            pin_memory=self.world.device.type == "cuda",
            generator=torch.Generator(),  # without it the loader would draw from the global generator
        )


def batches(loader: DataLoader[Any], world: World, settle: Callable[[], object] = lambda: None) -> Iterator[Any]:
    """What a loader yields; a worker's failure keeps its plain line, to which torch adds the worker's traceback."""
    if loader.num_workers:
        settle()  # a fork beside a thread that writes a checkpoint has crashed
    try:
        with _blocked(signal.SIGTERM):  # in its workers, which are started here, it stays so
            loaded = iter(loader)
        yield from loaded
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


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(parent: int) -> None:
    """End this worker by SIGTERM from its parent, or from anybody once that is gone.

    One that a scheduler sends to all processes must not end it: the parent has yet to save the state of the run.
    """
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent == os.getppid():
        pass
    os._exit(0)


def _begin_worker(determinism: Determinism, begin: Callable[[], object] | None, worker: int) -> None:
    Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    if begin:
        begin()
    flags.apply(determinism)
