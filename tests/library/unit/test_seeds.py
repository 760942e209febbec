"""Seeds: pure, far apart, and the same everywhere."""

import itertools
import random
import traceback

import numpy
import pytest
import torch

from samebits.core.seeds import PURPOSES, derive, seed_everything

KNOWN = {
    (0, "init"): 8599558735084232622,
    (0, "order", 0): 1814606099635984873,
    (0, "sample", 1, 2): 3093930971308225296,
    (0, "sample", 2, 1): 16159676799455968666,
    (2**53 - 1, "micro-batch", 787, 7): 14852523807089084769,
}


@pytest.mark.parametrize("arguments", KNOWN)
def test_seeds_are_the_known_ones(arguments: tuple[int, str, int]):
    assert derive(*arguments) == KNOWN[arguments]


# per number of ids: what each id runs over; (roots, ids...)
SAMPLES = {0: (5000,), 1: (100, 200), 2: (5, 60, 200), 3: (3, 20, 50, 3)}


def test_no_two_arguments_share_a_seed():
    arguments = [
        (root, purpose, *ids)
        for purpose, names in PURPOSES.items()
        for root, *ids in itertools.product(*map(range, SAMPLES[len(names)]))
    ]
    assert len(arguments) > 100_000
    assert len({derive(*each) for each in arguments}) == len(arguments)


def test_adding_the_rank_to_the_seed_would_collide():
    pairs = list(itertools.product(range(100), range(64)))
    assert len({derive(seed, "micro-batch", 0, rank) for seed, rank in pairs}) == 6400
    assert len({seed + rank for seed, rank in pairs}) == 163


def test_seeds_use_all_64_bits():
    seen = [derive(root, "init") for root in range(1000)]
    assert all(0 <= seed < 2**64 for seed in seen)
    for bit in range(64):  # 500 of 1000 on average, 16 the standard deviation; 5 of them allowed
        assert abs(sum(seed >> bit & 1 for seed in seen) - 500) < 80, bit


@pytest.mark.parametrize(
    "arguments",
    [("dropout",), ("Init",), ("init", 0), ("order",), ("order", 0, 1), ("sample", 0), ("micro-batch", 1, 2, 3)],
)
def test_unknown_purpose_or_wrong_ids_are_refused(arguments: tuple[str, int]):
    with pytest.raises(ValueError, match="wanted one of"):
        derive(0, *arguments)


# ---- the generators


def drawn() -> list[float]:
    return [random.random(), numpy.random.rand(), torch.rand(()).item(), torch.rand(()).item()]


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**64 - 1])
def test_seed_everything_seeds_python_numpy_and_torch(seed: int):
    seed_everything(seed)
    first = drawn()
    seed_everything(seed)
    assert drawn() == first
    seed_everything(seed ^ 1)
    assert all(one != other for one, other in zip(drawn(), first, strict=True))


def test_seeding_keeps_and_looks_up_no_stack(monkeypatch: pytest.MonkeyPatch):
    def slow(*arguments: object) -> None:
        raise AssertionError("a stack was formatted, which takes longer than a small step")

    monkeypatch.setattr(traceback, "format_stack", slow)
    seed_everything(1)


def test_seed_everything_seeds_all_gpus_from_the_start_of_a_run_on(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seen.append)
    seed_everything(7)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seed_everything(2**64 - 1)
    assert seen == [2**64 - 1]
