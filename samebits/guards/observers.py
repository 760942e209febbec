"""Observers that end a run, on all ranks alike: its state or surroundings are not as they must be, or SIGTERM came."""

import signal
from types import FrameType

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


class Stop(Observer):
    """Notes SIGTERM. The run then ends after the step under way, once its state is saved.

    Attributes:
        came: whether it came, or a caller has requested the same end.
    """

    name = "stop"
    stops = "by SIGTERM"

    def __init__(self) -> None:
        self.came = False
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True  # seen after the step, by all ranks together

    def ballot(self, view: View) -> Ballot:
        """The run ends where any rank got it."""
        return Ballot(stop=self.came)

    def restore(self) -> None:
        """Give SIGTERM back to the handler that it had before."""
        signal.signal(signal.SIGTERM, self._before)
