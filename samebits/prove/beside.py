"""The observer that has parts of a run trained again while it goes on."""

from ..core.observer import Ballot, Observer, View
from .proof import Proof


class Beside(Observer):
    """Goes on with the proof in each step. Ends a run that contradicts itself, or that is to stop for an early part.

    Rank 0 has the proof; on the others nothing is done.
    """

    name = "proof"
    stops = "for its proof"

    def __init__(self, proof: Proof | None) -> None:
        self._proof = proof

    def ballot(self, view: View) -> Ballot:
        """See to the segments. The trace is written a step late."""
        return Ballot(stop=bool(self._proof and self._proof.look(view.done - 1, view.of - view.done)))
