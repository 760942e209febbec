"""Observers that end a run, on all ranks alike, because its state or surroundings are not as they must be."""

from ..core.observer import Ballot, Observer, View
from ..core.ranks import World
from ..core.shards import moved
from . import opened
from .agreement import require_replicas


class Opened(Observer):
    """Refuses files of the project that the loop has opened and no hash covers."""

    name = "opened files"

    def ballot(self, view: View) -> Ballot:
        """Look at what the step has opened."""
        opened.require_known()
        return Ballot()


class Replicas(Observer):
    """Compares what ranks hold alike, every so many steps and after the last one; 0: never."""

    name = "replicas"

    def __init__(self, every: int, world: World, replicas: World) -> None:
        self._every, self._world, self._replicas = every, world, replicas

    def ballot(self, view: View) -> Ballot:
        """All ranks work at it together."""
        due = self._every and (view.done % self._every == 0 or view.is_last)
        if due and self._world.size > 1:
            require_replicas(view.weights(), view.done, self._world, self._replicas)
            others = {name: moved(held, self._world.device) for name, held in view.others().items()}
            require_replicas(others, view.done, self._world, self._replicas, "objects of run.steps(state=...)")
        return Ballot()
