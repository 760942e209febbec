"""Objects that hold an optimizer of the run and have state of their own, as schedules of its learning rate do.

torch's schedules, those of other libraries and one's own have no common class. But whatever changes an optimizer refers
to it, and the garbage collector knows what does.
"""

import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import UserError
from ..core.optimizers import Optimizers
from ..core.trees import pack

CONTAINERS = dict, list, tuple
DEPTH = 3  # references: an attribute, in a list there, in the dict of attributes


def require_saved(optimizers: Optimizers, objects: Mapping[str, object]) -> None:
    """Refuse a run with such an object that is not in `objects`, nor held by one of these.

    Raises:
        UserError: naming its class, and the word to add.
    """
    if not _unsaved(optimizers, objects):
        return
    gc.collect()  # some may be left over from before
    for held in _unsaved(optimizers, objects):
        kind, name = type(held).__name__, _name(held)
        raise UserError(
            f"a {kind} refers to the optimizer, and no checkpoint holds its state: a resumed run would differ. Give it "
            f"to run.steps(..., state={{'{name or 'schedule'}': {name or 'it'}}}), or compute the rate from step.number"
        )


def _unsaved(optimizers: Optimizers, objects: Mapping[str, object]) -> list[Any]:
    saved = _inside(objects.values())
    return [held for held in _holders(optimizers) if id(held) not in saved and not _repeats(held, optimizers)]


def _has_state(held: object) -> bool:
    """Whether it has state that is not the model's or an optimizer's. Its class is asked: an attribute may do work."""
    kinds = nn.Module, torch.optim.Optimizer, Optimizers
    return all(hasattr(type(held), name) for name in ("state_dict", "load_state_dict")) and not isinstance(held, kinds)


def _holders(optimizers: Optimizers) -> list[Any]:
    """All objects with state that refer to an optimizer or to its groups."""
    groups = [each.param_groups for each in optimizers.all]
    targets: tuple[Any, ...] = (*optimizers.all, *groups, *optimizers.param_groups)
    known = {id(each) for each in (optimizers.all, groups, *groups, *map(vars, optimizers.all))}
    found: dict[int, Any] = {}
    for _ in range(DEPTH):
        known.add(id(targets))
        referrers = [each for each in gc.get_referrers(*targets) if id(each) not in known]
        found |= {id(each): each for each in referrers if _has_state(each)}
        targets = tuple(each for each in referrers if type(each) in CONTAINERS)
        known |= {id(referrers), *map(id, targets)}
        if not targets:  # mostly so at once; each look goes through all objects of the process
            break
    return list(found.values())


def _inside(objects: Iterable[object]) -> dict[int, object]:
    """Objects and what they hold, by id, such as the schedules that one of torch's calls in turn."""
    found: dict[int, object] = {}
    left = list(objects)
    while left:
        each = left.pop()
        if id(each) not in found and (type(each) in CONTAINERS or _has_state(each)):
            found[id(each)] = each
            left += gc.get_referents(each)
    return found


def _repeats(held: Any, optimizers: Optimizers) -> bool:
    """Whether its state is that of an optimizer, as a wrapper's is."""
    try:
        states = [pack(each.state_dict(), "", {}) for each in (held, *optimizers.all)]
    except UserError:
        return False
    return states[0] in states[1:]


def _name(held: object) -> str | None:
    """The name of a variable of the owner's that holds it."""
    ours, frame = __name__.rsplit(".", 2)[0], sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if not frame.f_globals.get("__name__", "").startswith(f"{ours}."):
            for name, value in frame.f_locals.items():
                if value is held:
                    return name
    return None
