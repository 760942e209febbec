"""The numeric environment of a run, and the operations that may take it out of the portable class."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..base.text import flatten, some
from ..config.settings import Settings
from ..core.observer import Ballot, Observer, View
from ..core.ranks import World
from ..guards.agreement import require_agreement
from ..record.classes import PORTABLE, class_of
from . import environment
from .portable import COMPILED
from .watch import Operations


class Portability(Observer):
    """Whether every CPU gives the bits of a run. It is known for good when the first step is done.

    Attributes:
        environment: the numeric environment (what its digest is made of).
        promised: whether the class is the portable one so far.
        watch: sees the operations that the run calls, if it is, and what is compiled in any case.
        non-portable: those whose bits may depend on the CPU, each with a line on its first call.
    """

    name = "portability"

    def __init__(self, config: Settings, world: World, watch: Callable[[bool], Operations] = Operations) -> None:
        """`watch` makes what sees the operations, given whether they are wanted."""
        self._compute, self._world = config.compute, world
        self.environment = environment.numeric_environment(
            config.options.determinism, world.device, config.environment.variables
        )
        self.portable = class_of(self.environment, config.compute.plain).startswith(PORTABLE)
        self.watch = watch(self.portable)
        self.non_portable: Mapping[str, str] = {}
        self.first = 0  # the step with which the run begins

    def begin(self, model: nn.Module, judged: Callable[[], None]) -> None:
        """The loop begins; `judged` is called once its first step is judged."""
        self._model, self._judged = model, judged
        self.watch.rest()

    def watching(self) -> AbstractContextManager[None]:
        """The operations of the owner's lines are seen."""
        return self.watch.watched()

    def ballot(self, view: View) -> Ballot:
        """The first step is made, so that nearly all operations of the run are known; no checkpoint is written yet."""
        if view.step == self.first:
            self.judge(self._model)
            self._judged()
            self.watches = False
        return Ballot()

    def close(self, error: BaseException | None) -> None:
        """Nothing is seen any more."""
        self.watch.end()

    def meet(self, non_portable: Mapping[str, str]) -> None:
        """The run calls these operations: the CPU's model belongs to its environment, and no rank has another.

        Outside the portable class that is known already, and only compiled code adds to it.

        Raises:
            Disagreement: the ranks have different CPUs.
        """
        self.non_portable = {name: line for name, line in non_portable.items() if self.portable or name == COMPILED}
        if self.non_portable:
            self.environment = self.calling(self.non_portable)
            said = (
                f"bits of {some(list(self.non_portable), 3)} may depend on the CPU, and the ranks have different ones:"
            )
            require_agreement(flatten(self.environment), self._world, said)

    def calling(self, non_portable: Mapping[str, str]) -> dict[str, Any]:
        """The environment here of a run that calls these operations."""
        return environment.with_non_portable(self.environment, non_portable) if non_portable else self.environment

    def judge(self, model: nn.Module) -> None:
        """Gather the non-portable operations that the ranks have called until now; stop recording."""
        seen = self.watch.non_portable(model)
        self.watch.end()
        self.meet({name: line for rank in self._world.gather(seen)[::-1] for name, line in rank.items()})

    def record(self) -> dict[str, Any]:
        """What environment.json holds."""
        facts = {"world_size": self._world.size, "non_portable": self.non_portable}
        return environment.record(self.environment, self._compute, **facts)
