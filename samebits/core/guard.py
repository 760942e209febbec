"""Checks that each micro-batch of a step is accumulated exactly once, and gives each parameter one gradient.

A sum in which a micro-batch or a gradient is missing, or is there twice, looks like any other. So each line of a loop
that could make one is refused by name, and again whenever the loop goes on after all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from .errors import UserError

OWN_BACKWARD = (
    "a backward() of your own reached the model: give the loss to step.backward(loss) instead. Gradients for another "
    "purpose: torch.autograd.grad"
)


class Guard:
    """Watches the micro-batches and the gradients of one module.

    Attributes:
        propagating: whether a backward pass is under way.
        taken: the ids of the parameters that have their gradient of the micro-batch under way.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trainable = self._list_trainable()
        self._left: set[int] = set()  # the micro-batches that are still to be added
        self._turn: int | None = None
        self._begun = self._done = False  # the backward pass of the turn
        self._is_open = False  # whether a sum is begun, and not reduced
        self._refused: UserError | None = None
        self.taken: set[int] = set()
        self.propagating = False

    def _list_trainable(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}

    def begin(self, mine: Sequence[int]) -> None:
        """A sum begins, to which this rank adds the micro-batches `mine`.

        Raises:
            UserError: the sum before is not complete, or other parameters are trainable now.
        """
        self._require_none_refused()
        if self._is_open:
            self._refuse("gradients were added but never reduced: let the loop over a step's micro-batches end")
        before, now = self._trainable, self._list_trainable()
        if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) is not now.get(name)):
            self._refuse(
                f"{', '.join(changed[:3])}: frozen, thawed or replaced after run.steps(); do that before it. To let a "
                f"parameter rest for some steps, give its group lr=0 and weight_decay=0"
            )
        self._left, self._is_open = {*mine}, True

    def turn(self, micro_batch: int) -> None:
        """It is this micro-batch's turn."""
        self._turn, self._begun, self._done = micro_batch, False, False

    def add(self) -> None:
        """The loss of the micro-batch whose turn it is has come."""
        self._require_none_refused()
        if self._turn is None:
            self._refuse(
                "step.backward(loss) came outside of the loop over the step's micro-batches: call it once for each "
                "of them, inside `for batch in step:`"
            )
        if self._begun:
            self._refuse(
                f"micro-batch {self._turn}: step.backward(loss) was called twice; add several losses up, and call it "
                f"once for each micro-batch. For a sum of its own, iterate over the step again: for batch in step"
            )
        self._begun = True

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Only in here do gradients come: one for each parameter at most, and one at least."""
        self.taken = set()
        self.propagating = True
        try:
            yield
        finally:
            self.propagating = False
        if not self.taken:
            self._refuse(
                "the loss gave no gradient to any parameter of the model of this run: compute it by calling the model "
                "that run.steps() was given, with gradients"
            )

    def take(self, parameter: Tensor) -> None:
        """A gradient of this parameter is complete."""
        if not self.propagating:
            self._refuse(OWN_BACKWARD)
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            self._refuse(
                f"{self._name(parameter)}: its gradient is sparse, and the sum wants a dense one. Use sparse=False"
            )
        if id(parameter) in self.taken:
            self._refuse(
                f"{self._name(parameter)}: its gradient came twice for one micro-batch. If the model calls "
                f"torch.utils.checkpoint, give it use_reentrant=False; with parallel.shard=full, call each unit once"
            )
        self.taken.add(id(parameter))

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, known in self._trainable.items() if known is parameter)

    def done(self) -> None:
        """The gradients of this turn are added."""
        self._done = True

    def require(self, last: bool) -> None:
        """Refuse to go on from this turn, the `last` one of its micro-batch perhaps, without its gradients."""
        self._require_none_refused()
        if not self._done:
            self._refuse(
                f"micro-batch {self._turn}: an error in its step.backward(loss) was caught, and its gradients are "
                f"incomplete: let the error end the run"
                if self._begun
                else f"micro-batch {self._turn}: step.backward(loss) was not called; call it once for each micro-batch"
            )
        if last:
            self._left.discard(self._turn)
        self._turn = None

    def end(self) -> None:
        """The gradients are reduced."""
        self._require_none_refused()
        if self._left:
            self._refuse(f"micro-batch {min(self._left)}: step.backward(loss) was not called before the end of the sum")
        self._is_open = False

    def _refuse(self, message: str) -> NoReturn:
        self._refused = UserError(message)
        raise self._refused

    def _require_none_refused(self) -> None:
        """Refuse a sum of which something was refused before, and the error caught."""
        if self._refused:
            raise self._refused
