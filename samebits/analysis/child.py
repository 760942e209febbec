"""How a process of the analysis becomes a training of the owner's, which it watches from inside."""

from .. import front
from ..base.project import LIBRARY
from ..guards import stages
from ..run import ADDED, Added

ANALYSIS = LIBRARY / "analysis"


def train(added: Added, *arguments: str) -> None:
    """Run the owner's training in this process, as `samebits train` does, with what is `added` to its run.

    A run is refused whose content address lacks a module that it loaded. Those of the analysis that are loaded by now
    are none of the run's.
    """
    stages.leave_out(ANALYSIS)
    ADDED.set(added)
    front.train.main([*arguments], prog_name="samebits train", obj=front.Ours())
