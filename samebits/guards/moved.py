"""What the owner's code holds beside the saved state: where a run contradicts itself, what changed there is named.

A generator of random numbers, a loader that is halfway, a count in an object of one's own: none of these is refused,
for bits need not depend on it. Where they do, the proof of the run finds that, and this says where to look.
"""

import pickle
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import BuiltinMethodType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from ..core.generators import OWN, state_of
from ..core.state import State

MOST, ITEMS, DEPTH = 20_000, 200, 8  # objects that are looked at, items of each container, references to one
NUMBERS, SAMPLE = 1 << 16, 32  # of an array, and of a tensor
PLAIN = bool, int, float, complex, str, bytes, type(None)
CODE = type, ModuleType, FunctionType, BuiltinMethodType
WITHOUT = *OWN, torch.Tensor, numpy.ndarray  # further objects


class Moved:
    """What the variables of the owner's functions and modules hold as it is made."""

    def __init__(self, frames: Iterable[FrameType], state: State, seeded: Iterable[object]) -> None:
        """The frames are those of the functions, in whose package the modules lie.

        What is of the saved `state` is left out, and generators that are `seeded` for each micro-batch or sample.
        """
        self._frames, self._known = [*frames], [*_saved(state), *seeded]
        self._before = self._look()

    def names(self) -> list[str]:
        """What was there then and is another value now, such as `rng` or `train_set.calls`."""
        now = self._look()
        ways = [way for way, value in self._before.items() if now.get(way, value) != value]
        return [*dict.fromkeys(way.partition("._")[0] for way in ways)]  # what lies deeper is not the owner's

    def _look(self) -> dict[str, object]:
        values, known = dict[str, object](), {id(each) for each in self._known}
        left = deque((name, held, DEPTH) for name, held in self._variables())
        while left and len(known) < MOST:
            way, held, depth = left.popleft()  # the shortest ways first
            kind = type(held)
            if kind in PLAIN:
                values[way] = hash(held) if isinstance(held, str | bytes) else repr(held)
            elif id(held) not in known and not _is_ours(kind) and not isinstance(held, type | ModuleType):
                known.add(id(held))
                with suppress(Exception):  # an odd object is no reason to end a run
                    if (value := _value(held)) is not None:
                        values[way] = value
                    if depth and not isinstance(held, WITHOUT):
                        left += [(f"{way}{name}", each, depth - 1) for name, each in _inside(held)]
        return values

    def _variables(self) -> Iterator[tuple[str, Any]]:
        for frame in self._frames:
            yield from dict(frame.f_locals).items()
        packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in self._frames}
        for module, held in sorted(sys.modules.items()):
            package, _, rest = module.partition(".")
            if package in packages:
                found, prefix = dict(vars(held)).items(), rest and f"{rest}."
                yield from ((prefix + name, each) for name, each in found if _is_own(name, each))


def _is_own(name: str, held: Any) -> bool:
    """Whether a variable of a module is neither Python's nor code."""
    return not name.startswith("__") and not isinstance(held, CODE)


def _value(held: Any) -> object:
    """What can be compared of an object by itself; None where that is nothing."""
    if type(held) in OWN:
        state = state_of(held)  # a tensor is pickled with an address
        return hash(state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state))
    if isinstance(held, torch.Tensor):
        return tuple(held.shape), 0 if held.is_inference() else held._version, _sample(held)
    if isinstance(held, numpy.ndarray):
        return held.shape, 0 if held.dtype.hasobject else zlib.crc32(held.flat[:NUMBERS].tobytes())
    return len(held) if _is_container(held) else None


def _sample(held: torch.Tensor) -> str:
    """Some numbers of a tensor: `tensor.data.mul_(…)`, as averages are often updated, leaves its version as it was."""
    if type(held) not in (torch.Tensor, nn.Parameter) or held.is_meta or held.is_sparse or not held.is_contiguous():
        return ""
    return repr(held.detach().view(-1)[:: max(1, held.numel() // SAMPLE)].tolist())


def _saved(state: State) -> Iterator[object]:
    """What checkpoints hold, part by part."""
    yield from (*state.objects.values(), *state.optimizers.all, *state.optimizers.param_groups)
    for each in (state.model, *state.objects.values()):
        if isinstance(each, nn.Module):
            yield from (*each.modules(), *each.parameters(), *each.buffers())


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] == __name__.partition(".")[0]


def _is_container(held: Any) -> bool:
    return type(held).__module__ in ("builtins", "collections") and isinstance(held, Collection)


def _inside(held: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, each with the words that lead there."""
    if isinstance(held, dict):
        yield from ((f"[{key!r}]", each) for key, each in islice(held.items(), ITEMS) if type(key) in PLAIN)
    elif _is_container(held):
        yield from ((f"[{place}]", each) for place, each in enumerate(islice(held, ITEMS)))
    elif isinstance(held, MethodType | BuiltinMethodType):
        yield "", held.__self__
    elif isinstance(held, FunctionType):
        for name, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                yield f".{name}", cell.cell_contents
    elif isinstance(held, GeneratorType):
        yield "._place", held.gi_frame and held.gi_frame.f_lasti
        yield from ((f".{name}", each) for name, each in (held.gi_frame.f_locals if held.gi_frame else {}).items())
    with suppress(AttributeError):
        yield from ((f".{name}", each) for name, each in object.__getattribute__(held, "__dict__").items())
