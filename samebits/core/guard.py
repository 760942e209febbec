"""Checks that each micro-batch of a step is accumulated exactly once, and gives each parameter one gradient.

A sum in which a micro-batch or a gradient is missing, or is there twice, looks like any other. So each line of a loop
that could make one is refused by name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .errors import UserError


class Guard:
    """Watches the micro-batches and the gradients of one module.

    Attributes:
        propagating: whether a backward pass is under way.
        taken: the ids of the parameters that have their gradient of the micro-batch under way.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trainable = self._list_trainable()
        self._mine: Sequence[int] = ()
        self._added: list[int] = []
        self.taken: set[int] = set()
        self.propagating = False

    def _list_trainable(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}

    def begin(self, mine: Sequence[int]) -> None:
        """A step begins, in which this rank runs the micro-batches `mine`.

        Raises:
            UserError: the gradients of the step before were never reduced, or other parameters are trainable now.
        """
        if self._mine:
            raise UserError("gradients were added but never reduced: call reduce() once per step, at its end")
        before, now = self._trainable, self._list_trainable()
        if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) is not now.get(name)):
            raise UserError(
                f"{', '.join(changed[:3])}: frozen, thawed or replaced after run.steps(); do that before it. To let a "
                f"parameter rest for some steps, give its group lr=0 and weight_decay=0"
            )
        self._mine, self._added = tuple(mine), []

    def add(self, micro_batch: int) -> None:
        """A micro-batch has its turn."""
        if micro_batch in self._added:
            raise UserError(f"micro-batch {micro_batch} was added twice: add the loss of each micro-batch once")
        self._added.append(micro_batch)

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
            raise UserError(
                "the loss gave no gradient to any parameter of the model of this run: compute it with the network "
                "that the loss function is given"
            )

    def take(self, parameter: Tensor) -> None:
        """A gradient of this parameter is complete."""
        if not self.propagating:
            raise UserError(
                "a backward() of your own reached the model: let the loss function return the loss, step.backward() "
                "does the rest. Gradients for another purpose: torch.autograd.grad"
            )
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UserError(
                f"{self._name(parameter)}: its gradient is sparse, and the sum wants a dense one. Use sparse=False"
            )
        if id(parameter) in self.taken:
            raise UserError(
                f"{self._name(parameter)}: its gradient came twice for one micro-batch. If the model calls "
                f"torch.utils.checkpoint, give it use_reentrant=False; with parallel.shard=full, call each unit once"
            )
        self.taken.add(id(parameter))

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, known in self._trainable.items() if known is parameter)

    def require(self, micro_batch: int) -> None:
        """Refuse to go on without this micro-batch."""
        if micro_batch not in self._added:
            raise UserError(f"micro-batch {micro_batch} was never added: call add() for each one, before the next")

    def end(self) -> None:
        """The gradients are reduced."""
        for micro_batch in self._mine:
            self.require(micro_batch)
        self._mine = ()
