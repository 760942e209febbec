"""Items are those of seeded generators, whichever they draw from; generators that none draws from cost nothing."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from samebits.core import generators
from samebits.core.generators import seeded
from samebits.core.seeds import seed_everything

Draw = Callable[[], Any]

DRAWS: dict[str, Draw] = {
    "python": random.random,
    "python's normal deviates, of which it keeps every second": lambda: [random.gauss() for _ in range(3)],
    "as many of python's as its state has words": lambda: [random.getrandbits(32) for _ in range(624)],
    "numpy": lambda: numpy.random.rand(3).tolist(),
    "numpy's normal deviates": lambda: numpy.random.standard_normal(3).tolist(),
    "as many of numpy's as its state has words": lambda: numpy.random.bytes(4 * 624),
    "torch": lambda: torch.rand(3).tolist(),
}
KINDS = {"python": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(()).item()}


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    """As in a process that has made no item yet, in any state of the generators."""
    seed_everything(99)
    generators.generators.cache_clear()
    yield
    generators.generators.cache_clear()


def eager(seed: int, make: Draw) -> Any:
    """The definition."""
    seed_everything(seed)
    return make()


def used() -> list[bool]:
    return [generator.used for generator in generators.generators()]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_first_and_later_items_are_those_of_seeded_generators(draw: Draw):
    assert [seeded(seed, draw) for seed in range(4)] == [eager(seed, draw) for seed in range(4)]


@pytest.mark.parametrize("kinds", [c for n in range(4) for c in itertools.combinations(KINDS, n)], ids="-".join)
def test_generator_that_is_used_late_is_seeded_too(kinds: tuple[str, ...]):
    def items(way: Callable[[int, Draw], Any]) -> list[Any]:
        return [way(seed, lambda n=seed: [KINDS[kind]() for kind in kinds if n >= 3]) for seed in range(6)]

    assert items(seeded) == items(eager)
    assert used() == ["python" in kinds, "numpy" in kinds]


@pytest.mark.parametrize("draw", [draw for name, draw in DRAWS.items() if name != "torch"])
def test_draw_that_is_overlooked_would_show(draw: Draw, monkeypatch: pytest.MonkeyPatch):
    """After an item that drew nothing, as the generator has that one's seed still."""
    monkeypatch.setattr(generators, "_drew", lambda unused: False)
    seeded(0, lambda: None)
    assert seeded(1, draw) != eager(1, draw)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_beside_the_items_do_not_matter(draw: Draw):
    """Both generators keep every second normal deviate beside their state, and give it out without a change of that."""
    items = []
    for seed in range(4):
        random.gauss(), numpy.random.standard_normal()
        items.append(seeded(seed, draw))
    assert items == [eager(seed, draw) for seed in range(4)]


@pytest.mark.parametrize("draw", [random.gauss, numpy.random.standard_normal])
def test_deviate_that_waits_is_not_an_items(draw: Draw):
    seeded(0, lambda: None)
    draw()
    assert seeded(1, draw) == eager(1, draw)


def test_only_the_first_item_that_draws_is_made_twice():
    calls = []

    def make() -> float:
        calls.append(len(calls))
        return random.random() if len(calls) > 3 else 0.0

    for seed in range(6):
        seeded(seed, make)
    assert len(calls) == 7


def test_generators_that_nothing_draws_from_are_left_alone():
    seeded(0, lambda: None)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    for seed in range(1, 4):
        seeded(seed, lambda: torch.rand(()))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states and used() == [False, False]


def test_failure_of_an_item_is_that_of_its_seed():
    def make() -> None:
        raise ValueError(f"{random.random()}")

    with pytest.raises(ValueError) as error:
        seeded(5, make)
    random.seed(5)
    assert str(error.value) == str(random.random())
    with pytest.raises(ZeroDivisionError):
        seeded(5, lambda: 1 / 0)


def test_generator_that_is_put_in_the_place_of_numpys_is_seen():
    mtrand = numpy.random.mtrand
    before = mtrand.get_bit_generator()
    try:
        item = seeded(5, lambda: mtrand.set_bit_generator(numpy.random.MT19937(3)))
        assert item is None and used() == [False, True]
    finally:
        mtrand.set_bit_generator(before)


@pytest.mark.parametrize("look", ["_look_at_python", "_look_at_numpy"])
def test_generator_that_cannot_be_looked_at_is_always_seeded(look: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generators, look, lambda: None)
    assert any(used())
    for draw in DRAWS.values():
        assert seeded(7, draw) == eager(7, draw)
