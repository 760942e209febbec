"""The optimizers of a run as one: their groups, their state, and the checkpoint that holds it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Refused

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

# Optimizers that one gradient per step cannot serve.
UNFIT = {
    "LBFGS": "makes several backward passes in one step, by a closure; a step has one here. Use another optimizer",
    "SparseAdam": "wants sparse gradients, which have no order-free sum. Use Adam, with sparse=False in embeddings",
}


WANTED = "one or several of torch.optim wanted"


class Optimizers:
    """One optimizer or several, each with parameters of its own.

    Attributes:
        all: the optimizers, in the order in which `run.steps` was given them.
    """

    def __init__(self, given: Given) -> None:
        self.all = (given,) if isinstance(given, torch.optim.Optimizer) else tuple(given)
        for optimizer in self.all:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise Refused(f"run.steps(): a {type(optimizer).__name__} given among the optimizers, {WANTED}")
            for kind in type(optimizer).__mro__:
                if kind.__name__ in UNFIT and kind.__module__.startswith("torch.optim"):
                    raise Refused(f"{type(optimizer).__name__} {UNFIT[kind.__name__]}")
        if not self.all:
            raise Refused(f"run.steps(): no optimizer given, {WANTED}")
        held = self.parameters
        if twice := len(held) - len({id(parameter) for parameter in held}):
            raise Refused(f"{twice} parameters are held by two optimizers; give each parameter to one of them")

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self.all for group in optimizer.param_groups]

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        """The tensors that an optimizer keeps for this parameter."""
        states = [optimizer.state[parameter] for optimizer in self.all if parameter in optimizer.state]
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """The state of one optimizer as it gives it; of several, each under its number."""
        states = [optimizer.state_dict() for optimizer in self.all]
        return states[0] if len(states) == 1 else {str(number): state for number, state in enumerate(states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            Refused: it is the state of other optimizers.
        """
        states = [state] if "param_groups" in state else list(state.values())
        if len(states) != len(self.all):
            raise Refused(f"optimizers: the checkpoint holds {len(states)}, run.steps() was given {len(self.all)}")
        for optimizer, held in zip(self.all, states, strict=True):
            try:
                optimizer.load_state_dict(held)
            except ValueError as error:
                kind = type(optimizer).__name__
                raise Refused(f"the checkpoint holds the state of another {kind}: {error}") from None
