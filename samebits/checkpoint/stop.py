"""The end that SIGTERM asks for: the state is saved, and one more step made, which the resumed run makes again."""

import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import FrameType

from ..core.observer import Ballot, Observer, View

QUICK = 2.0  # seconds: where one of the latest steps took longer, none is made beyond the state that is saved
LATEST = 20  # steps


class Stop(Observer):
    """Ends the run where SIGTERM came to any rank, or where the step of `trace.values` is done.

    The state is saved with the step under way. Then one more step is made and recorded, as long as steps are quick, for
    who sends SIGTERM is in a hurry. A resumed run makes it again, so that state which no checkpoint holds is found.

    Attributes:
        came: whether SIGTERM came to this rank.
        ends_epoch: whether a step ends an epoch; such a one may evaluate, and has times of its own.
        saved: how many steps are done in the state that is saved for the resumed run; None where the run goes on.
        stops: why the run ends.
    """

    name = "stop"
    stops = "as trace.values asks"
    counts = 1  # ranks to which SIGTERM came

    def __init__(self, values: int = -1) -> None:
        self.came = False
        self.saved: int | None = None
        self.ends_epoch: Callable[[int], bool] = lambda step: False
        self._values = values
        self._seconds: dict[bool, deque[float]] = defaultdict(lambda: deque(maxlen=LATEST))
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True  # seen after the step, by all ranks together

    def begin_step(self, view: View) -> None:
        """Take the time."""
        self._began = time.monotonic()

    def ballot(self, view: View) -> Ballot:
        """Vote for the end at once where no step is to follow, or where it was made."""
        ends = self.saved is not None or (self._is_due(view, self.came) and not self._is_quick(view.done))
        return Ballot(counts=[self.came], stop=ends)

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Note that the state is to be saved."""
        self._seconds[self.ends_epoch(view.step)].append(time.monotonic() - self._began)
        if self.saved is None and (self._is_due(view, sums[0] > 0) or view.stops) and not view.is_last:
            self.saved = view.done
            self.stops = "by SIGTERM" if sums[0] else view.stops or self.stops

    def _is_due(self, view: View, came: bool) -> bool:
        return came or 0 <= self._values < view.done

    def _is_quick(self, step: int) -> bool:
        """Whether the latest steps of the kind of this one, of which there are some, were quick."""
        return max(self._seconds[self.ends_epoch(step)], default=QUICK) < QUICK

    def restore(self) -> None:
        """Give SIGTERM back to the handler that it had before."""
        signal.signal(signal.SIGTERM, self._before)
