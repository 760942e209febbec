"""A training that ends after some of its steps, or when it is finished: a part of another one, made again.

What its owner does after `run.finish()`, such as an upload, is not done again.

python -m samebits.analysis.repeated STEPS ARGUMENTS      of `samebits train`; the proof of a run starts it
"""

import sys

from ..core.observer import Ballot, Observer, View
from ..run import Added
from . import child


class Until(Observer):
    """Ends the run once so many steps are done; it saves its state as for SIGTERM."""

    name = "until"
    stops = "where the part of it ends that is made again"

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def ballot(self, view: View) -> Ballot:
        """The same on all ranks."""
        return Ballot(stop=view.done >= self._steps)


if __name__ == "__main__":
    child.train(Added(observers=[Until(int(sys.argv[1]))], finished=sys.exit), *sys.argv[2:])
