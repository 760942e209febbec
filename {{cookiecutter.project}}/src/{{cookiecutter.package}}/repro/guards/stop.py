"""SIGTERM ends a run after the step under way, on all ranks together, once its state is saved."""

import signal
from types import FrameType

from ..core.observer import Ballot, Observer, View


class Stop(Observer):
    """Notes SIGTERM from when it is made until it is restored.

    Attributes:
        came: whether it came, or somebody has asked for the same.
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
        """From here on it does what it did before."""
        signal.signal(signal.SIGTERM, self._before)
