"""Items seeded from one number each, which costs little where they draw nothing.

Seeding python's and numpy's generators takes longer than many an item takes to make, and most transforms draw from
one generator at most. So a generator is seeded once an item is seen to draw from it: that item is made again, seeded,
and from then on the generator is seeded for each item. Nothing drawn from an unseeded generator is ever used.
"""

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy
import torch

from .seeds import seed_torch

T = TypeVar("T")

WORDS = 624  # of the Mersenne twister, which both generators are
State = tuple[int, int]
Look = Callable[[], State]


@dataclass
class Generator:
    """A global generator of numbers.

    Attributes:
        seed: seeds it.
        look: two words of its state, of which a draw changes one.
        used: whether items were seen to draw from it, or nobody can see that.
        left: how the last item left it. If somebody drew from it since, a deviate may wait beside its state, of which
            an item would take the next one.
    """

    seed: Callable[[int], object]
    look: Look
    used: bool = False
    left: State | None = None


def seeded(seed: int, make: Callable[[], T]) -> T:
    """What `make` returns while python's, numpy's and torch's generators are seeded from `seed`.

    `make` is called a second time where it drew from a generator for the first time in this process.
    """
    while True:
        seed_torch(seed)  # takes hardly more time than to see whether it is used
        unused = []
        for generator in generators():
            if generator.used or generator.look() != generator.left:
                generator.seed(seed)
                generator.left = generator.look()
            if not generator.used:
                unused.append(generator)
        try:
            item = make()
        except Exception:
            if not _drew(unused):
                raise
        else:
            if not _drew(unused):
                return item


def _drew(unused: Sequence[Generator]) -> bool:
    """Whether one of these generators is not as it was; if so, it is a used one from here on."""
    moved = [generator for generator in unused if generator.look() != generator.left]
    for generator in moved:
        generator.used = True
    return bool(moved)


@cache
def generators() -> tuple[Generator, Generator]:
    """Python's and numpy's."""
    return (
        _generator(random.seed, _look_at_python()),
        _generator(lambda seed: numpy.random.seed(seed % 2**32), _look_at_numpy()),  # all that it takes
    )


def _generator(seed: Callable[[int], object], look: Look | None) -> Generator:
    return Generator(seed, look) if look else Generator(seed, lambda: (0, 0), used=True)


def _look_at_python() -> Look | None:
    inner: Any = random._inst
    state = (ctypes.c_uint32 * (1 + WORDS)).from_address(id(inner) + object.__basicsize__)
    *words, position = random.getstate()[1]
    return (lambda: (state[0], state[1])) if [*state] == [position, *words] else None


def _look_at_numpy() -> Look | None:
    current = numpy.random.mtrand.get_bit_generator
    inner = current()
    address = getattr(getattr(inner, "ctypes", None), "state_address", None)
    known: Any = numpy.random.get_state(legacy=False)
    if known["bit_generator"] != "MT19937" or not address:
        return None
    state = (ctypes.c_uint32 * (1 + WORDS)).from_address(address)

    def look() -> State:
        if current() is not inner:  # the item has put another one in its place
            return -1, -1
        return state[WORDS], state[0]

    return look if [*state] == [*known["state"]["key"].tolist(), known["state"]["pos"]] else None


@contextmanager
def preserved() -> Iterator[None]:
    """After it python's, numpy's and torch's generators go on where they were."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
