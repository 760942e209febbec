"""Which samples, when, and how: the same on any number of ranks and workers, from any step on."""

import itertools
import random

import numpy
import pytest
import torch
from project.config import Config
from project.repro import sampling
from project.repro.sampling import Plan
from project.repro.world import World
from torch.utils.data import DataLoader

SAMPLES, BATCH, SHARDS = 100, 24, 4


def plan(seed: int = 0) -> Plan:
    return Plan(SAMPLES, BATCH, SHARDS, seed)


def world(rank: int, size: int) -> World:
    return World(rank, size, torch.device("cpu"))


def flat(plan: Plan, steps: int) -> list[sampling.Key]:
    return [key for step in range(steps) for shard in range(SHARDS) for key in plan.keys(step, shard)]


def test_every_sample_is_seen_exactly_once_per_epoch():
    epochs = 6
    keys = flat(plan(), plan().steps(epochs))
    for epoch in range(epochs):
        assert sorted(index for e, index in keys if e == epoch) == list(range(SAMPLES))
    assert len(keys) % BATCH == 0 and len(keys) - epochs * SAMPLES < BATCH


def test_batches_straddle_epochs_and_all_shards_have_one_size():
    first_of_next = SAMPLES // BATCH
    epochs = [epoch for shard in range(SHARDS) for epoch, _ in plan().keys(first_of_next, shard)]
    assert set(epochs) == {0, 1} and epochs == sorted(epochs)
    assert {len(plan().keys(s, shard)) for s in range(20) for shard in range(SHARDS)} == {BATCH // SHARDS}


def test_epochs_are_shuffled_differently_and_by_the_seed():
    def order(seed: int, epoch: int) -> list[int]:
        return [index for e, index in flat(plan(seed), plan().steps(2)) if e == epoch]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("size", range(1, SHARDS + 1))
def test_ranks_share_out_all_shards_once(size: int):
    shares = [plan().mine(world(rank, size)) for rank in range(size)]
    assert sorted(itertools.chain(*shares)) == list(range(SHARDS))
    assert all(shares)


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


def loaded(config: Config, place: World, workers: int, start: int, stop: int) -> list[torch.Tensor]:
    settings = config.model_copy(update={"loader": config.loader.model_copy(update={"workers": workers})})
    return list(sampling.loader(Drawing(), plan(), settings, place, start, stop))


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_count_does_not_change_a_bit(config: Config, workers: int):
    alone = loaded(config, world(0, 1), 0, 0, 6)
    assert torch.equal(torch.stack(alone), torch.stack(loaded(config, world(0, 1), workers, 0, 6)))
    assert len(torch.stack(alone)[..., 1:].unique()) == 3 * 6 * BATCH  # it draws, and never the same twice


def test_without_the_seeding_the_worker_count_shows():
    def drawn(workers: int) -> torch.Tensor:
        torch.manual_seed(0)
        loader = DataLoader(Drawing(), batch_size=10, num_workers=workers, generator=torch.Generator())
        return torch.stack(list(loader))[..., 3]

    assert not torch.equal(drawn(0), drawn(1))


def test_world_size_does_not_change_a_bit(config: Config):
    whole = torch.stack(loaded(config, world(0, 1), 0, 0, 4)).view(4, SHARDS, -1)
    for size in (2, 3, 4):
        for rank in range(size):
            mine = plan().mine(world(rank, size))
            part = torch.stack(loaded(config, world(rank, size), 0, 0, 4)).view(4, len(mine), -1)
            assert torch.equal(part, whole[:, mine.start : mine.stop])


def test_loader_starts_anywhere(config: Config):
    whole = loaded(config, world(0, 1), 0, 0, 9)
    later = loaded(config, world(0, 1), 2, 5, 9)
    assert torch.equal(torch.stack(whole[5 * SHARDS :]), torch.stack(later))


def test_iterating_leaves_the_global_generator_to_the_items(config: Config):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    iter(sampling.loader(Drawing(), plan(), config, world(0, 1), 0, 1))
    assert torch.equal(before, torch.get_rng_state())
