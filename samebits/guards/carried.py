"""Local variables of the loop in `train.py` that a later step reads and no checkpoint holds.

    best = 0.0
    for step in run.steps(model, optimizer, dataset, epochs=60):
        ...
        best = max(best, accuracy)

A resumed run begins with `best = 0.0` again. The bytecode of the owner's function says which variables the loop
changes and reads later; containers that it fills are looked at when a checkpoint is due.
"""

import dis
import re
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from torch import Tensor

from ..base.shape import shown
from ..core.errors import UserError
from .probes import INSTALLED, STDLIB
from .unsaved import is_plain

CONTAINERS = dict, list, set, deque
VALUES = int, float, str, tuple, type(None), Tensor, np.ndarray, np.generic, *CONTAINERS
MOST = 1000  # items of a container that is looked at: what a loop fills begins small
ACCESS = re.compile("(LOAD|STORE|DELETE)_(?:FAST|DEREF)(?!_AND_CLEAR)")
JUMPS = {*dis.hasjrel, *dis.hasjabs}
LEAVES = "RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"  # and never goes on below
FOREIGN = *STDLIB, *INSTALLED
REMEDY = (
    "Use step.number, samebits.Best or samebits.Patience, or name an object that holds it in run.steps(state=...). If "
    "no bit depends on it"
)


class Carried:
    """The variables of the function that iterates over the steps."""

    def __init__(self, unsaved: Collection[str]) -> None:
        """Call it as the loop begins; `unsaved` are variables on which no bit depends.

        Raises:
            UserError: the loop carries a number from step to step.
        """
        self._before: dict[str, tuple[Any, str]] = {}
        for frame in owners_frames():
            held = {name: value for name, value in frame.f_locals.items() if name not in unsaved}
            for name, line in carried(frame.f_code, frame.f_lasti).items():
                if isinstance(held.get(name, self), VALUES):
                    raise UserError(
                        f"{Path(frame.f_code.co_filename).name}:{line}: {name} changes from step to step and no "
                        f"checkpoint holds it: a resumed run begins with {shown(held[name])} again. "
                        f"{_remedy(name)}"
                    )
            self._before |= {name: (value, repr(value)) for name, value in held.items() if _is_small(value)}

    def require(self) -> None:
        """Refuse a container that was filled since.

        Raises:
            UserError: naming it.
        """
        for name, (value, before) in self._before.items():
            if not _is_small(value) or repr(value) != before:
                raise UserError(
                    f"{name} was changed by the loop, from {shown(before)[1:-1]}, and no checkpoint holds it: a "
                    f"resumed run begins with that again. {_remedy(name)}"
                )


def _remedy(name: str) -> str:
    return f"{REMEDY}: run.steps(..., unsaved=({name!r},))"


def owners_frames() -> Iterator[FrameType]:
    """The owner's function that iterates, and those that iterate over generators of the owner's."""
    library, frame = __name__.split(".")[0], sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        ours = frame.f_globals.get("__name__", "").split(".")[0] == library
        if ours or frame.f_code.co_filename.startswith(FOREIGN):
            continue
        yield frame
        if not frame.f_code.co_flags & CO_GENERATOR:
            return


def carried(code: CodeType, at: int) -> dict[str, int]:
    """Variables that the loop around an instruction changes, and that may be read before they are changed again.

    Returns:
        By name, a line that changes it.
    """
    found = list(dis.get_instructions(code))
    places = {each.offset: place for place, each in enumerate(found)}
    here = max(place for offset, place in places.items() if offset <= at)
    follow = [_follow(place, each, places) for place, each in enumerate(found)]
    _turn_once(follow, [place for place, each in enumerate(found) if each.opname == "FOR_ITER" and place != here])
    reads, writes = zip(*map(_accesses, found), strict=True)
    loop = _loop(here, follow)
    live = _live(follow, reads, writes)[here]
    line, lines = 0, dict[str, int]()
    for place, each in enumerate(found):
        line = (each.positions and each.positions.lineno) or line
        if place in loop:
            lines |= {name: line for name in writes[place] & live if name not in lines}
    return lines


def _follow(place: int, instruction: dis.Instruction, places: Mapping[int, int]) -> list[int]:
    after = [] if instruction.opname.startswith(LEAVES) else [place + 1]
    return [*after, places[instruction.argval]] if instruction.opcode in JUMPS else after


def _turn_once(follow: list[list[int]], loops: Sequence[int]) -> None:
    """Let each of these loops have a turn before it ends, as the one over a step's micro-batches has.

    Else a variable that it changes, and that is read after it, would seem to be read as it was before.
    """
    for loop in loops:
        first, end = follow[loop]
        back = [place for place, after in enumerate(follow) if place > loop and loop in after]
        follow[loop] = [first]
        for place in back:
            follow[place] = [*follow[place], end]


def _accesses(instruction: dis.Instruction) -> tuple[set[str], set[str]]:
    """The variables that it reads, and those that it writes; some instructions do several of these."""
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    reads, writes = set[str](), set[str]()
    for kind, name in zip(ACCESS.findall(instruction.opname), names, strict=False):
        if kind == "LOAD" and name not in writes:
            reads.add(name)
        elif kind != "LOAD":
            writes.add(name)
    return reads, writes


def _loop(here: int, follow: Sequence[Sequence[int]]) -> range:
    """The innermost loop around a place: from where a jump leads back to, to the last of these jumps."""
    jumps = [(to, place) for place, after in enumerate(follow) for to in after if to <= here <= place]
    return range(max(jumps)[0], max(jumps)[1] + 1) if jumps else range(0)


def _reversed(follow: Sequence[Sequence[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in follow]
    for place, after in enumerate(follow):
        for each in after:
            before[each].append(place)
    return before


def _live(follow: Sequence[Sequence[int]], reads: Sequence[set[str]], writes: Sequence[set[str]]) -> list[set[str]]:
    """The variables that may be read from each place on, before they are written."""
    live = [set(each) for each in reads]
    before, left = _reversed(follow), [*range(len(follow))]
    while left:
        place = left.pop()
        known = set().union(*(live[each] for each in follow[place])) - writes[place] | reads[place]
        if known != live[place]:
            live[place] = known
            left += before[place]
    return live


def _is_small(value: Any) -> bool:
    """Whether it is a container of a few numbers, texts, and containers of such."""
    return isinstance(value, CONTAINERS) and len(value) <= MOST and is_plain(value)
