"""The step beyond the saved state: what came of it is kept, and compared with what comes of it in the resumed run.

The trace compares batch, loss and gradient of each step that is made again, and weights of each tenth one. This adds
the weights and all other state of that one step, also where nothing is traced.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..address.address import digest
from ..base.files import write_json
from ..core.observer import Observer, View
from ..core.state import State
from ..record.contradiction import contradiction
from .stop import Stop

PHASES = {"loss": "loss", "weights": "weights", "optimizer": "optimizer's state", "state": "objects of the loop"}


class Repeated(Observer):
    """Keeps digests of the step that `stop` has the run make beyond its saved state, and compares those of `before`.

    Where ranks hold shards, each has one, and all work at the digests together.
    """

    name = "repeated step"

    def __init__(self, path: Path | None, state: State | None, stop: Stop, before: Mapping[str, Any] | None) -> None:
        """`path` is the file, which rank 0 has; a rank that has no part in the digests has no `state` either."""
        self._path, self._state, self._stop, self._before = path, state, stop, before
        self._losses: list[Tensor] = []

    def begin_step(self, view: View) -> None:
        """Nothing of the step is seen yet."""
        self._losses = []

    def gradients(self, view: View) -> None:
        """Take in the loss of a sum."""
        if (self._is_beyond(view) or self._is_again(view)) and view.loss is not None:
            self._losses.append(view.loss.detach().clone())

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Compare, or keep, what came of the step.

        Raises:
            RunError: other bits came of it before the interruption.
        """
        beyond, again = self._is_beyond(view), self._is_again(view)
        found = self._digests(view, self._state) if self._state and (beyond or again) else {}
        if not self._path:
            return
        if again and self._before:
            known = self._before["digests"]
            if differing := [phase for phase in PHASES if found[phase] != known[phase]]:
                raise contradiction(view.step, PHASES[differing[0]])
        if beyond:
            write_json(self._path, {"step": view.step, "digests": found})
        elif view.is_last:
            self._path.unlink(missing_ok=True)

    def _is_beyond(self, view: View) -> bool:
        return self._stop.saved == view.step

    def _is_again(self, view: View) -> bool:
        return self._before is not None and self._before["step"] == view.step

    def _digests(self, view: View, state: State) -> dict[str, str]:
        there = state.look(view.done).digested()
        return {
            "loss": digest([float(loss).hex() for loss in self._losses]),
            "weights": digest(there.digests["model"]),
            "optimizer": digest(there.digests["optimizer"]),
            "state": there.content,
        }
