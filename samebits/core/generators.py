"""Items seeded from one number each, which costs little where they draw nothing.

Seeding python's and numpy's generators takes longer than many an item takes to make, and most transforms draw from
one generator at most. So a generator is seeded once an item is seen to draw from it: that item is made again, seeded,
and from then on the generator is seeded for each item. Nothing drawn from an unseeded generator is ever used.
"""

import ctypes
import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy
import torch

from .seeds import numbered, seed_torch

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


def seeded(seed: int, make: Callable[[], T], own: Sequence[Any] = ()) -> T:
    """What `make` returns while python's, numpy's and torch's generators are seeded from `seed`, and some of its `own`.

    `make` is called a second time where it drew from a generator for the first time in this process.
    """
    while True:
        seed_torch(seed)  # takes hardly more time than to see whether it is used
        seed_own(own, seed)
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


class Kind(NamedTuple):
    """How a generator of one's own is seeded, and what its state is."""

    seed: Callable[[Any, int], object]
    state: Callable[[Any], Any]


def _reseed(generator: Any, seed: int) -> None:
    generator.state = type(generator)(seed).state


OWN: dict[type, Kind] = {
    torch.Generator: Kind(torch.Generator.manual_seed, torch.Generator.get_state),
    random.Random: Kind(random.Random.seed, random.Random.getstate),
    numpy.random.Generator: Kind(
        lambda generator, seed: _reseed(generator.bit_generator, seed), lambda generator: generator.bit_generator.state
    ),
    numpy.random.RandomState: Kind(
        lambda generator, seed: generator.seed(seed % 2**32), lambda generator: generator.get_state()
    ),
}
LOOKED_AT, ITEMS = 200_000, 10_000  # objects that are looked at, and items of each container
CONTAINERS = list, tuple, deque


def seed_own(generators: Sequence[Any], seed: int) -> None:
    """Seed generators of one's own, each to a stream of its own, as the global ones are seeded from `seed`."""
    for number, generator in enumerate(generators):
        OWN[type(generator)].seed(generator, numbered(seed, number))


def state_of(generator: Any) -> Any:
    """The state of a generator of one's own."""
    return OWN[type(generator)].state(generator)


def own_generators(roots: Iterable[Any]) -> list[Any]:
    """The generators that objects hold: in attributes, containers, closures, and objects in these."""
    known = {id(each) for each in (random._inst, torch.default_generator, numpy.random.mtrand._rand)}
    found, left = [], [*roots][::-1]
    while left and len(known) < LOOKED_AT:
        each = left.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        if type(each) in OWN:
            found.append(each)
        else:
            left += [inner for inner in islice(_inside(each), ITEMS) if not isinstance(inner, ATOMS)][::-1]
    return found


ATOMS = str, bytes, int, float, type(None), type, torch.Tensor, numpy.ndarray


def _inside(held: Any) -> Iterable[Any]:
    """What an object refers to."""
    if isinstance(held, dict):  # another mapping may do work
        return held.values()
    if isinstance(held, CONTAINERS):
        return held
    if isinstance(held, functools.partial):
        return held.func, *held.args, *held.keywords.values()
    if isinstance(held, MethodType):
        return held.__self__, held.__func__
    if isinstance(held, FunctionType):
        return [*_cells(held), *(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]
    if isinstance(held, ModuleType):
        return ()
    return [*getattr(held, "__dict__", {}).values(), *_in_slots(held)]


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _in_slots(held: Any) -> Iterator[Any]:
    for _, slot in slots_of(type(held)):
        with suppress(AttributeError):  # it is empty
            yield slot.__get__(held)


def slots_of(kind: Any) -> list[tuple[str, MemberDescriptorType]]:
    """Return the slots of a class and its bases, by name."""
    members = [pair for base in kind.__mro__ for pair in vars(base).items()]
    return [(name, slot) for name, slot in members if isinstance(slot, MemberDescriptorType)]


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
