"""When a run's state is saved."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..core.observer import Ballot, Observer, View
from ..core.state import State
from .saver import Saver
from .stop import Stop


class Keeper(Observer):
    """Saves the state every so many steps, after the last one, and where the run ends early."""

    name = "checkpoint"
    counts = 1  # ranks that are writing

    def __init__(
        self,
        saver: Saver | None,
        every: int,
        state: State,
        stop: Stop,
        before: Sequence[Callable[[], None]] = (),
        held: Collection[int] = (),
        noted: Collection[int] = (),
        note: Callable[[int, str], None] = lambda step, digest: None,
    ) -> None:
        """`before` are called by each rank before each save; without a `saver` this rank, or nobody, saves nothing.

        After `held` numbers of steps the state is saved, too; after `noted` ones `note` is given its digest.
        """
        self.saver, self._every, self._state, self._stop, self._before = saver, every, state, stop, before
        self._held, self._noted, self._note = held, noted, note

    def ballot(self, view: View) -> Ballot:
        """Say whether this rank is writing.

        Raises:
            RunError: a checkpoint could not be written.
        """
        if self.saver and (failure := self.saver.failure()):
            raise failure
        return Ballot(counts=[self.saver is not None and self.saver.writing])

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Complete what all ranks have written; begin the next one where it is due."""
        if self.saver and not sums[0]:
            self.saver.seal()
        leaves = self._stop.saved
        if leaves is not None and leaves < view.done:
            return  # the resumed run is to make this step again
        if view.done in self._noted:
            self._note(view.done, replace(self._state.look(view.done).digested(), stopped=view.stopped).content)
        if leaves or view.is_last or view.done % self._every == 0 or view.done in self._held:
            for check in self._before:
                check()
            if self.saver:
                self.saver.save(replace(self._state.look(view.done), stopped=view.stopped))
                if leaves:
                    self.saver.wait()  # before one more step

    def finish(self) -> None:
        """Return once all is written.

        Raises:
            RunError: it could not be.
        """
        if self.saver:
            self.saver.wait()
            if failure := self.saver.failure():
                raise failure

    def close(self, error: BaseException | None) -> None:
        """After an error this rank's writing comes to its end, and nothing is completed."""
        if self.saver and error:
            self.saver.join()
