"""Plain attributes that no checkpoint can hold: what a resumed run, or one on another world size, would not have.

The core saves what the loop changes (core/attributes.py). What is of another kind, or large, it leaves out; and what
each micro-batch changes, such as a count of calls or the last attention map, depends on how many of them this rank
runs. Both are named once, and stand in the record. If a bit depends on one, the proof of the run finds that. What ranks
hold otherwise is no one's state, and is refused.
"""

import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..address.address import digest
from ..core.alike import together
from ..core.attributes import Attributes, remedy
from ..core.errors import UserError
from ..core.loop import Loop
from ..core.observer import Ballot, Observer, View
from ..core.ranks import World

BY_EACH = "is changed by each micro-batch"


class UnsavedState(Observer):
    """Looks in the second step, which has made what modules make once, and in each whose state is saved."""

    name = "unsaved state"

    def __init__(self, loop: Loop, start: int, every: int, note: Callable[[Mapping[str, str]], object]) -> None:
        """The run goes on with the step `start`, and saves its state `every` so many steps.

        `note` is given all attributes that no checkpoint holds, each with the reason, where there is a further one.
        """
        self._attributes, self._world = loop.state.attributes, loop.world
        self._start, self._every = start, every
        self._divides = loop.plan.micro_batches > 1  # else a step is one call on any ranks
        self._seen: list[dict[str, str]] = []  # of the first two micro-batches of a step, before each
        self._note, self._named, self._step = note, dict[str, str](), start

    def begin_step(self, view: View) -> None:
        """No micro-batch has come."""
        self._seen, self._step = [], view.step

    def batch(self, view: View) -> None:
        """Look before the first two micro-batches of a sum."""
        if len(self._seen) < 2 and not view.number and self._is_due(view):
            self._seen.append(self._attributes.look().texts())

    def gradients(self, view: View) -> None:
        """Name what the micro-batches have changed, once, and leave it out."""
        if view.number or not self._seen:
            return
        before, alone = self._seen[-1], len(self._seen) == 1
        if alone and view.step == self._start:  # a module may have made something at its first call
            return
        now = self._attributes.look()
        texts = now.texts()
        for way in sorted(texts.keys() | before.keys()):
            if texts.get(way) != before.get(way) and not (alone and _is_graph(texts.get(way, ""))):
                self._leave_out({now.name_of(way)})

    def ballot(self, view: View) -> Ballot:
        """Look at all once, early."""
        if view.step == self._start + 1:
            self.require()
        return Ballot()

    def _leave_out(self, names: Collection[str]) -> None:
        for name in names:
            self._attributes.leave_out(name)  # as if run.steps(unsaved=...) had named it
        self._name(dict.fromkeys(names, BY_EACH))

    def _name(self, found: Mapping[str, str]) -> None:
        """Name on rank 0, once, attributes that no checkpoint holds, each with the reason."""
        for name in sorted(found.keys() - self._named.keys()):
            self._named[name] = found[name]
            if self._world.is_main:
                line = f"step {self._step}: {name} {found[name]}, so no checkpoint holds it. {remedy(name)}"
                print(line, file=sys.stderr, flush=True)
                self._note(self._named)

    def require(self) -> None:
        """Name what a checkpoint leaves out, and refuse what it must not lack; all ranks ask together.

        Raises:
            UserError: naming it.
        """
        lost = together(self._world, self._attributes.lost)
        if self._world.size > 1:  # a rank that runs few of them may see less
            found = self._world.gather((self._named, lost))
            self._leave_out({name for named, _ in found for name, why in named.items() if why == BY_EACH})
            lost = {name: why for _, of_rank in found for name, why in of_rank.items()}
        require_alike(self._attributes, self._world)
        self._name(lost)

    def _is_due(self, view: View) -> bool:
        if not self._divides:
            return False
        return view.step <= self._start + 1 or view.is_last or view.done % self._every == 0


def require_alike(attributes: Attributes, world: World) -> None:
    """Refuse attributes that ranks hold otherwise; all ask together.

    Raises:
        UserError: naming the first one, with the ranks.
    """
    if world.size == 1:
        return
    changed = attributes.changed()
    if len(set(world.gather(digest(changed)))) == 1:
        return
    of_ranks = world.gather(changed)
    for way in sorted(set().union(*of_ranks)):
        for rank, each in enumerate(of_ranks):
            if each.get(way) != of_ranks[0].get(way):
                name, _ = each.get(way) or of_ranks[0][way]
                raise UserError(
                    f"{name} differs between rank 0 and rank {rank}, so no checkpoint can hold it. {remedy(name)}"
                )


def _is_graph(text: str) -> bool:
    """Whether it is a tensor whose graph goes with its step, such as a weight that is computed from others."""
    return text.startswith('[["graph"')


def is_plain(held: Any) -> bool:
    """Whether it is a number, text, None, or a container of such."""
    if isinstance(held, dict):
        return all(map(is_plain, held.values()))
    if isinstance(held, list | tuple | set | deque):
        return all(map(is_plain, held))
    return isinstance(held, int | float | str | None)
