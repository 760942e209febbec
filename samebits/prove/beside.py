"""The observer that has parts of a run trained again while it goes on."""

from ..core.observer import Ballot, Observer, View
from .proof import Proof


class Beside(Observer):
    """Begins the proof as soon as its first segments are recorded, and ends a run that contradicts itself.

    Rank 0 has the proof; on the others nothing is done.
    """

    name = "proof"
    stops = "by a part of it that was trained again and differs"

    def __init__(self, proof: Proof | None) -> None:
        self._proof, segments = proof, proof.beside() if proof else []
        self._due = segments[-1].stop + 1 if segments else 0  # one more: the trace is written a step late
        self._begun = False

    def ballot(self, view: View) -> Ballot:
        """See to the segments."""
        if not self._proof or not self._due or view.done < self._due:
            return Ballot()
        if not self._begun:
            self._proof.begin()
            self._begun = True
        return Ballot(stop=self._proof.look())
