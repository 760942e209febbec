"""Which samples, when, and how: the same on any number of ranks and workers, from any step on."""

import copy
import os
import random
import signal
import subprocess
import tracemalloc
from collections import namedtuple
from functools import lru_cache
from multiprocessing import active_children
from pathlib import Path
from threading import Event
from typing import Any

import numpy
import pytest
import torch
from project.config import Config
from support import OURS
from torch.utils.data import DataLoader, Dataset

from samebits import stage
from samebits.checkpoint.keeper import Keeper
from samebits.checkpoint.saver import Saver
from samebits.core import flags, sampling
from samebits.core.errors import RunError, UserError
from samebits.core.evaluation import evaluating
from samebits.core.order import Permutation
from samebits.core.orders import Weighted
from samebits.core.ranks import World
from samebits.core.repeated import prints, require_repeated
from samebits.core.sampling import AHEAD, MicroBatches, Plan
from samebits.core.seeds import derive
from samebits.core.tree import blocks
from samebits.run import Run

SAMPLES, BATCH, MICRO_BATCHES = 100, 24, 4


def plan(seed: int = 0) -> Plan:
    return Plan(SAMPLES, BATCH, MICRO_BATCHES, seed)


def world(rank: int, size: int) -> World:
    return World(rank, size, torch.device("cpu"))


def mine(place: World) -> range:
    """The micro-batches of a rank."""
    return blocks(MICRO_BATCHES, place.size)[place.rank]


def step_of(plan: Plan, step: int) -> list[sampling.Key]:
    return [key for micro_batch in range(MICRO_BATCHES) for key in plan.keys(step, micro_batch)]


def flat(plan: Plan, steps: int) -> list[sampling.Key]:
    return [key for step in range(steps) for key in step_of(plan, step)]


def test_every_sample_is_seen_exactly_once_per_epoch():
    epochs = 6
    keys = flat(plan(), plan().steps(epochs))
    for epoch in range(epochs):
        assert sorted(index for e, index in keys if e == epoch) == list(range(SAMPLES))
    assert len(keys) % BATCH == 0 and len(keys) - epochs * SAMPLES < BATCH


def test_batches_straddle_epochs_and_all_micro_batches_have_one_size():
    first_of_next = SAMPLES // BATCH
    epochs = [epoch for epoch, _ in step_of(plan(), first_of_next)]
    assert set(epochs) == {0, 1} and epochs == sorted(epochs)
    sizes = {len(plan().keys(step, micro_batch)) for step in range(20) for micro_batch in range(MICRO_BATCHES)}
    assert sizes == {BATCH // MICRO_BATCHES}


@pytest.mark.parametrize("samples", [1, 2, 5, 63, 64, 100, 500])
def test_micro_batch_holds_the_samples_of_its_positions_however_many_epochs_it_spans(samples: int):
    one = Plan(samples, 192, 2, 5)
    orders = [Permutation(samples, derive(5, "order", epoch)) for epoch in range(3 * 192 // samples + 1)]
    places = [divmod(position, samples) for position in range(3 * 192)]
    keys = [key for step in range(3) for micro_batch in range(2) for key in one.keys(step, micro_batch)]
    assert keys == [(epoch, orders[epoch][position]) for epoch, position in places]
    for micro_batches in ([0, 1], [1, 0], [0], [1]):
        at_once = one.keys_of(range(1, 3), micro_batches)
        assert at_once == [one.keys(step, micro_batch) for step in (1, 2) for micro_batch in micro_batches]
        assert {type(number) for part in at_once for key in part for number in key} == {int}


def test_epochs_are_shuffled_differently_and_by_the_seed():
    def order(seed: int, epoch: int) -> list[int]:
        return [index for e, index in flat(plan(seed), plan().steps(2)) if e == epoch]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_epoch_ends_are_counted_once_each():
    ends = [step for step in range(plan().steps(6)) if plan().ends_epoch(step)]
    assert ends == [-(-epoch * SAMPLES // BATCH) - 1 for epoch in range(1, 7)]
    assert [s for s in range(plan().steps(6)) if plan().ends_epoch(s, every=3)] == [ends[2], ends[5]]


class Drawing:
    """A dataset whose transform draws from all three global generators, as users' transforms do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(index), random.random(), numpy.random.rand(), torch.rand(()).item()]
        return torch.tensor(drawn, dtype=torch.float64)


def with_workers(config: Config, workers: int, **parallel: int) -> Config:
    settings = {"loader": config.loader.model_copy(update={"workers": workers})}
    return config.model_copy(update=settings | {"parallel": config.parallel.model_copy(update=parallel)})


def loader(
    dataset: Any, config: Config, place: World, start: int = 0, stop: int = 1, **more: Any
) -> torch.utils.data.DataLoader[Any]:
    keys = MicroBatches(plan(), mine(place), start, stop)
    return sampling.Loading(config.options, place, **more).loader(dataset, keys)


def loaded(config: Config, place: World, workers: int, start: int, stop: int) -> list[torch.Tensor]:
    return list(loader(Drawing(), with_workers(config, workers), place, start, stop))


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_count_does_not_change_a_bit(config: Config, workers: int):
    alone = loaded(config, world(0, 1), 0, 0, 6)
    assert torch.equal(torch.stack(alone), torch.stack(loaded(config, world(0, 1), workers, 0, 6)))
    assert len(torch.stack(alone)[..., 1:].unique()) == 3 * 6 * BATCH  # it draws, and never the same twice


class Reducing:
    """A dataset whose transform adds many numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.rand(count).sum() for count in (100_003, 1_000_003)])


def test_item_is_made_with_one_thread_in_every_process():
    made, stated = [], flags.effective()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            made.append((sampling.Seeded(Reducing(), 0)[(0, 0)], Reducing()[0]))
            with pytest.raises(UserError):
                sampling.Seeded(Refusing(), 0)[(0, 0)]
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
    (one, alone), (two, together) = made
    assert torch.equal(one, two) and not torch.equal(alone, together)  # where nobody sets one thread, two add otherwise
    assert flags.effective() == stated


class Refusing(Dataset[Any]):
    """Its items are refused."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        raise UserError("item: none seen, one wanted")


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_in_a_worker_is_told_in_its_own_line(config: Config, workers: int):
    settings = with_workers(config, workers)
    for size in (1, 2):
        place = world(size - 1, size)
        with pytest.raises(UserError) as refused:
            next(sampling.batches(loader(Refusing(), settings, place), place))
        assert str(refused.value) == "item: none seen, one wanted"
        assert refused.value.local == (size > 1)  # another rank has other samples


class Lengths(Dataset[torch.Tensor]):
    """Its items are of different lengths."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1 + index % 3)


def padded(items: list[torch.Tensor]) -> torch.Tensor:
    """A batch of items of different lengths, filled up by what it draws."""
    assert torch.get_num_threads() == 1
    longest = max(map(len, items))
    return torch.stack([torch.cat([item, torch.rand(longest - len(item)) - random.random()]) for item in items])


@pytest.mark.parametrize("workers", [0, 2])
def test_function_of_the_owner_makes_the_batches(config: Config, workers: int):
    """What it draws depends on no worker, rank or start, and is not what the items drew."""
    settings = with_workers(config, workers)
    alone = [*loader(Lengths(), config, world(0, 1), 0, 3, collate=padded)]
    again = [*loader(Lengths(), settings, world(0, 1), 1, 3, collate=padded)]
    second = [*loader(Lengths(), settings, world(1, 2), 1, 2, collate=padded)]
    count = MICRO_BATCHES
    assert all(map(torch.equal, alone[count:], again)) and len(again) == 2 * count
    assert all(map(torch.equal, alone[count + count // 2 : 2 * count], second)) and len(second) == count // 2
    filled = torch.cat([batch[batch < 0] for batch in alone])
    assert len(filled) > 10 and len(filled.unique()) == len(filled)


class Makers(Drawing):
    """Its items say which process has made them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid()])


def evaluated(config: Config, workers: int, dataset: Any, **more: Any) -> list[torch.Tensor]:
    """The batches of an evaluation whose samples so many workers make."""
    loading = sampling.Loading(with_workers(config, workers).options, world(0, 1), **more)
    with evaluating(torch.nn.Identity(), dataset, 5, loading) as batches:
        return [batch for _, batch in batches]


@pytest.mark.parametrize("collate", [None, lambda items: torch.stack(items) + torch.rand(1)])
def test_evaluation_by_workers_sees_the_same(config: Config, collate: Any):
    alone = evaluated(config, 0, Drawing(), collate=collate)
    assert len(alone) > 3
    for workers in (1, 2):
        made = evaluated(config, workers, Drawing(), collate=collate)
        assert len(made) == len(alone) and all(map(torch.equal, alone, made))


def test_evaluation_has_as_many_workers_as_are_asked_for_and_batches(config: Config):
    for workers in (0, 1, 2):
        makers = {int(maker) for maker in torch.cat(evaluated(config, workers, Makers()))}
        assert makers == {os.getpid()} if not workers else len(makers) == workers and os.getpid() not in makers
    few = torch.utils.data.Subset(Makers(), range(7))  # type: ignore[arg-type]
    assert len({int(maker) for maker in torch.cat(evaluated(config, 4, few))}) == 2


def test_no_worker_is_forked_beside_the_thread_that_writes_a_checkpoint(config: Config, tmp_path: Path):
    """Such a fork has crashed."""
    run = Run(OURS, with_workers(config, 2), tmp_path)
    run.world = world(0, 1)
    saver = Saver(tmp_path, None, config.checkpoint, lambda: None)
    run._keeper = Keeper(saver, 1, None, None)  # type: ignore[arg-type]
    held, seen, join = Event(), list[bool](), saver.join

    def let_go() -> None:
        held.set()
        join()

    saver.join = let_go  # type: ignore[method-assign]
    os.register_at_fork(before=lambda: seen.append(held.is_set()))
    saver._begin(held.wait)
    try:
        with stage.evaluating(torch.nn.Identity(), Makers(), run, batch=5) as batches:
            assert all(os.getpid() not in batch for _, batch in batches)
    finally:
        held.set()
    assert seen == [True, True]


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_do_not_stack_are_refused_with_the_way_that_works(config: Config, workers: int):
    place = world(0, 1)
    with pytest.raises(UserError) as refused:
        next(sampling.batches(loader(Lengths(), with_workers(config, workers), place), place))
    assert str(refused.value).startswith(
        "items of the dataset cannot be stacked to a batch: RuntimeError: stack expects "
    )
    assert "collate=..., a function that makes a batch of a list of items" in str(refused.value)


def test_sample_that_is_drawn_twice_in_an_epoch_draws_anew(config: Config):
    """By its place, on any rank: else a rare sample would have one augmentation in all of an epoch."""
    rare = Plan(SAMPLES, BATCH, MICRO_BATCHES, 5, Weighted([1.0] + [0.0] * (SAMPLES - 1)))
    for place in (world(0, 1), world(1, 2)):
        keys = MicroBatches(rare, mine(place), 0, 2)
        drawn = torch.cat([*sampling.Loading(config.options, place).loader(Drawing(), keys)])
        assert (drawn[:, 0] == 0).all() and len(drawn[:, 1:].unique()) == 3 * len(drawn)


def test_function_that_opens_a_file_is_checked(config: Config):
    seen: list[str] = []
    given = {"collate": lambda items: seen.append("batch") or padded(items), "check": lambda: seen.append("check")}
    next(iter(loader(Lengths(), config, world(0, 1), **given)))
    assert seen[-2:] == ["batch", "check"]


class Hanging(Refusing):
    """Its items never come."""

    def __getitem__(self, index: int) -> Any:
        Event().wait()


@pytest.mark.long
def test_worker_that_hangs_is_told_in_a_line(config: Config):
    settings = with_workers(config, 1, timeout_seconds=1)
    hanging = loader(Hanging(), settings, world(0, 1))
    said = "^a loader worker gave nothing for 1 s; the same command goes on from the last"
    with pytest.raises(RunError, match=said):
        next(sampling.batches(hanging, world(0, 1)))


def test_worker_heeds_sigterm_of_its_parent_alone(config: Config):
    """Also where it hangs, or a process that ends would wait for it."""
    settings, before = with_workers(config, 1), {*active_children()}
    batches = sampling.batches(loader(Lengths(), settings, world(0, 1), stop=3, collate=padded), world(0, 1))
    next(batches)
    (worker,) = {*active_children()} - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert len([*batches]) == 3 * MICRO_BATCHES - 1
    with sampling._blocked(signal.SIGTERM):
        iterator = iter(loader(Hanging(), settings, world(0, 1)))
    (worker,) = {*active_children()} - before
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0
    del iterator


@pytest.mark.long
def test_without_the_seeding_the_worker_count_shows():
    def drawn(workers: int) -> torch.Tensor:
        torch.manual_seed(0)
        loader = DataLoader(Drawing(), batch_size=10, num_workers=workers, generator=torch.Generator())
        return torch.stack(list(loader))[..., 3]

    assert not torch.equal(drawn(0), drawn(1))


def test_world_size_does_not_change_a_bit(config: Config):
    whole = torch.stack(loaded(config, world(0, 1), 0, 0, 4)).view(4, MICRO_BATCHES, -1)
    for size in (2, 3, 4):
        for rank in range(size):
            own = mine(world(rank, size))
            part = torch.stack(loaded(config, world(rank, size), 0, 0, 4)).view(4, len(own), -1)
            assert torch.equal(part, whole[:, own.start : own.stop])


def test_loader_starts_anywhere(config: Config):
    whole = loaded(config, world(0, 1), 0, 0, 9)
    later = loaded(config, world(0, 1), 2, 5, 9)
    assert torch.equal(torch.stack(whole[5 * MICRO_BATCHES :]), torch.stack(later))


def test_iterating_leaves_the_global_generator_to_the_items(config: Config):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    iter(loader(Drawing(), config, world(0, 1)))
    assert torch.equal(before, torch.get_rng_state())


# ---- a dataset of which no list would fit into memory

FAR = 10**10
MIDDLE = FAR // BATCH // 2
STEPS = {"the first": 0, "in the middle": MIDDLE, "between two epochs": FAR // BATCH, "in a later one": 7 * MIDDLE}


class Far:
    """10^10 samples, each its own index."""

    def __len__(self) -> int:
        return FAR

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def peak(samples: int) -> int:
    """Bytes that a plan needs at most, with the samples of a step in the middle of its first epoch."""
    tracemalloc.start()
    far = Plan(samples, BATCH, MICRO_BATCHES, 0)
    assert all(far.keys(samples // BATCH // 2, micro_batch) for micro_batch in range(MICRO_BATCHES))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_memory_does_not_grow_with_the_dataset():
    peak(10**3)  # whatever Python makes once
    few, many = peak(10**3), peak(FAR)
    assert many < 100_000 and abs(many - few) < 2_000  # wider integers; an eight-byte entry for each would be 80 GB


@pytest.mark.parametrize("start", STEPS.values(), ids=STEPS)
def test_far_steps_hold_the_samples_of_their_positions(start: int):
    orders = {epoch: Permutation(FAR, derive(0, "order", epoch)) for epoch in range(5)}
    positions = [divmod(position, FAR) for position in range(start * BATCH, (start + 1) * BATCH)]
    far = Plan(FAR, BATCH, MICRO_BATCHES, 0)
    keys = step_of(far, start)
    assert keys == [(epoch, orders[epoch][position]) for epoch, position in positions]
    assert len(set(keys)) == BATCH


@pytest.mark.parametrize("start", STEPS.values(), ids=STEPS)
def test_resumed_keys_are_those_of_a_run_that_went_on(start: int):
    share, first = [1, 3], max(0, start - 4)  # as ranks take turns under parallel.shard=full
    whole = list(MicroBatches(Plan(FAR, BATCH, MICRO_BATCHES, 0), share, first, start + 4))
    resumed = list(MicroBatches(Plan(FAR, BATCH, MICRO_BATCHES, 0), share, start, start + 4))
    assert resumed == whole[(start - first) * len(share) :] and len(resumed) == 4 * len(share)


@pytest.mark.parametrize("start", STEPS.values(), ids=STEPS)
def test_resuming_looks_for_the_samples_of_a_few_steps_only(start: int, config: Config, scrambled: list[int]):
    far = Plan(FAR, BATCH, MICRO_BATCHES, config.seed)
    keys = MicroBatches(far, range(MICRO_BATCHES), start, far.steps(8))
    micro_batches = iter(sampling.Loading(config.options, world(0, 1)).loader(Far(), keys))
    step = [next(micro_batches) for _ in range(MICRO_BATCHES)]
    assert BATCH <= len(scrambled) < 3 * AHEAD  # two walks on average, at most
    assert torch.cat(step).tolist() == [index for _, index in step_of(far, start)]


# ---- the first batch, whose items are made twice


class Averaging(Dataset[Any]):
    """Subtracts the mean of the items so far."""

    mean = 0.0

    def __getitem__(self, index: int) -> Any:
        self.mean = 0.5 * self.mean + index
        return {"name": str(index), "x": torch.tensor(index - self.mean)}


class Keeping(Dataset[Any]):
    """Keeps what it has drawn for an item."""

    def __init__(self) -> None:
        self.drawn: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> Any:
        return self.drawn.setdefault(index, torch.rand(()) if index not in self.drawn else torch.zeros(()))


class Unseeded(Dataset[Any]):
    """Draws where nobody seeds."""

    def __getitem__(self, index: int) -> Any:
        return numpy.random.default_rng().random()


DEPEND = {Averaging: r"item\['x'\]", Keeping: "the sequence of numbers that it draws", Unseeded: "item"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", DEPEND, ids=lambda dataset: dataset.__name__)
def test_item_that_depends_on_those_before_is_refused(dataset: type[Dataset[Any]], workers: int, config: Config):
    there = loader(dataset(), with_workers(config, workers), world(0, 1))
    with pytest.raises(UserError, match=rf"^item \d+ of the dataset is another one .*: {DEPEND[dataset]} differs"):
        next(sampling.batches(there, world(0, 1)))


Pair = namedtuple("Pair", "one other")


class Image:
    """As PIL's."""

    mode, size = "L", (2, 1)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def tobytes(self) -> bytes:
        return self.data


KINDS: list[tuple[Any, Any]] = [  # two that differ in a part
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
    (numpy.zeros(2), numpy.zeros((2, 1))),
    (numpy.array(["a", None]), numpy.array(["a", "b"])),
    ({"a": (1, ["x"])}, {"a": (1, ["y"])}),
    (Pair(1, 2.0), Pair(1, 2.5)),
    (Image(b"ab"), Image(b"ac")),
    ([Image(b"ab")], [Image(b"ab"), None]),
]


@pytest.mark.parametrize(("one", "other"), KINDS)
def test_parts_of_items_are_compared(one: Any, other: Any):
    require_repeated(0, prints(one, []), prints(copy.deepcopy(one), []))
    with pytest.raises(UserError, match=r"^item 7 of the dataset"):
        require_repeated(7, prints(one, []), prints(other, []))


class Remade(Drawing):
    """Counts how often its items are made, and keeps tables of its own; no item depends on it."""

    def __init__(self) -> None:
        self.made = 0
        self.table = lru_cache(lambda index: index / SAMPLES)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made += 1
        return super().__getitem__(index) + self.table(index)


def test_first_batch_alone_is_made_twice_and_has_the_same_bits(config: Config):
    dataset = Remade()
    batches = iter(loader(dataset, config, world(0, 1), 0, 2))
    first = next(batches)
    assert dataset.made == 2 * len(first) == 2 * BATCH // MICRO_BATCHES
    samples = sampling.Seeded(Remade(), config.seed)
    keys = plan().keys(0, 0)
    assert torch.equal(first, torch.stack([samples[key] for key in keys]))
    before = dataset.made
    assert len(next(batches)) == len(first) and dataset.made <= before + len(first) + 2  # first draws, made anew
