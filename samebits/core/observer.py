"""What the core reports while it trains, and to whom.

An observer is given views of a step: it can change no bit. Its tensors are detached; that nobody wrote into them is
checked by their version counters (not through `.data`, numpy or storages, which have none). What it draws from a
generator reaches nobody, because the core seeds them after each event.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .ranks import World
from .shards import Held

if TYPE_CHECKING:
    from .loop import Loop


class View:
    """A step as it is now.

    Attributes:
        step: its number, counted from 0.
        number: in `batch` and `gradients`, of the sum: 0, or more where the loop iterates over the step once more.
        leaf, batch: in `batch`, the micro-batch and its tensors on the device.
        loss: in `gradients`, the mean over all micro-batches: float64, a scalar.
        stops: in `end_step`, why the run ends after this step; None where it does not.
    """

    __slots__ = "_loop", "batch", "leaf", "loss", "number", "step", "stops"

    def __init__(
        self,
        loop: "Loop",
        step: int,
        leaf: int = -1,
        batch: Sequence[Tensor] = (),
        loss: Tensor | None = None,
        stops: str | None = None,
        number: int = 0,
    ) -> None:
        self._loop, self.step, self.leaf, self.batch, self.loss, self.stops = loop, step, leaf, batch, loss, stops
        self.number = number

    @property
    def of(self) -> int:
        """How many steps the run has."""
        return self._loop.stop

    @property
    def done(self) -> int:
        """How many steps are done once this one is."""
        return self.step + 1

    @property
    def is_last(self) -> bool:
        """Whether the run ends with this step."""
        return self.done == self.of

    @property
    def stopped(self) -> str | None:
        """Why the run's owner ends it after this step; None where it goes on, or has all its steps."""
        return self._loop.stopped

    @property
    def skipped(self) -> bool:
        """Whether the last sum was not finite, so that the loop gets no gradients of it."""
        return self._loop.skipped

    @property
    def ranks(self) -> World:
        """All ranks, and which one this is."""
        return self._loop.world

    def weights(self) -> dict[str, Held]:
        """What the model's `state_dict` holds, buffers included."""
        return self._loop.state.weights()

    def gradients(self) -> dict[str, Held]:
        """The gradients of the parameters that have one, by name."""
        return self._loop.state.gradients()

    def others(self) -> dict[str, Held]:
        """What the loop's own objects hold: their tensors, and of each a digest of all else."""
        return self._loop.state.others()

    def buffers(self) -> dict[str, Tensor]:
        """All buffers, also those that no `state_dict` holds."""
        return {name: buffer.detach() for name, buffer in self._loop.model.named_buffers()}

    def state(self) -> dict[str, list[Held]]:
        """The tensors that an optimizer keeps for each parameter, by its name."""
        state = self._loop.state
        return {name: state.optimizers.state_of(parameter) for name, parameter in state.parameters.items()}

    def groups(self) -> list[list[Tensor]]:
        """The parameters of each group of the optimizers, as this rank holds them."""
        return [[held.detach() for held in group["params"]] for group in self._loop.optimizers.param_groups]


@dataclass(frozen=True)
class Ballot:
    """What an observer has to say of a step before the ranks count: one all-reduce, one wait for the device.

    Attributes:
        counts, sums: numbers that are added up over the ranks, modulo 2**64: `Observer.counts` numbers, and a vector of
            `Observer.sums` of int64 on the device.
        own: scalars of this rank that are read.
        stop: whether the run is to end after this step.
    """

    counts: Sequence[int] = ()
    sums: Tensor | None = None
    own: Sequence[Tensor] = ()
    stop: bool = False


class Observer:
    """Is told what happens in each step. Those with a say in the ballot are on every rank, in one order.

    Attributes:
        name: it is reported with.
        vital: whether its failure ends the run, on all ranks alike. Else it is reported once, and left out.
        counts, sums: how many numbers each of its ballots holds; the same on all ranks.
        stops: why a run ends for which it votes so.
        watches: whether `watching` is still of use.
    """

    name = "observer"
    vital = True
    counts = 0
    sums = 0
    stops = ""
    watches = True

    def watching(self) -> AbstractContextManager[None]:
        """What the owner's lines of a step run in; the loading of its samples does not."""
        return nullcontext()

    def begin_step(self, view: View) -> None:
        """A step begins."""

    def batch(self, view: View) -> None:
        """The model is about to see a micro-batch."""

    def gradients(self, view: View) -> None:
        """The gradients are summed over all ranks; the owner's update comes next, or a further sum of the step."""

    def ballot(self, view: View) -> Ballot:
        """The owner is done with the step."""
        return Ballot()

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """The step is counted: `sums` holds what all ranks have put into `counts` and `sums`, `own` what was read.

        A failure in here ends this rank at once: nothing is counted any more, perhaps not even another step.
        """

    def close(self, error: BaseException | None) -> None:
        """The last step is done, or `error` ended the loop."""
