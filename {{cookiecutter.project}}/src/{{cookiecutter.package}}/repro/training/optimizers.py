"""The optimizers of a run as one: their groups, their state, and the checkpoint that holds it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Refused
from .pieces import Held, Piece, Stored
from .trees import realized

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
        self._updated: dict[Tensor, Tensor] = {}
        self._pieces: dict[Tensor, Piece] = {}
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

    def replace(self, others: Mapping[Tensor, Tensor]) -> None:
        """Have the optimizers update other parameters in place of some."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
            for parameter in [held for held in optimizer.state if held in others]:
                optimizer.state[others[parameter]] = optimizer.state.pop(parameter)

    def cut(self, pieces: Mapping[Tensor, Piece]) -> dict[Tensor, Tensor]:
        """Have the optimizers update this rank's pieces of parameters, vectors that share their memory.

        Returns:
            What is updated in place of each parameter; its `.grad` is what the optimizer uses.
        """
        held = [parameter for parameter in self.parameters if parameter in pieces]
        updated: dict[Tensor, Tensor] = {p: nn.Parameter(pieces[p].local) for p in held}
        self._updated = updated
        self._pieces = {updated[parameter]: pieces[parameter] for parameter in held}
        self.replace(updated)
        for optimizer in self.all:  # some have state from the beginning
            for parameter, state in optimizer.state.items():
                state.update({name: self._part(parameter, value) for name, value in state.items()})
        return updated

    def state_of(self, parameter: Tensor) -> list[Held]:
        """The tensors that an optimizer keeps for this parameter of the model."""
        parameter = self._updated.get(parameter, parameter)
        states = [optimizer.state[parameter] for optimizer in self.all if parameter in optimizer.state]
        values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [self._held(parameter, value) for value in values]

    def _held(self, parameter: Tensor, value: Any) -> Any:
        """A value of the state of a parameter; as a piece where it is one."""
        piece = self._pieces.get(parameter)
        return piece.of(value) if piece and isinstance(value, Tensor) and value.shape == parameter.shape else value

    def state_dict(self) -> dict[str, Any]:
        """The state of one optimizer as it gives it, with pieces where there are; of several, under their numbers."""
        states = [self._of_each(optimizer, optimizer.state_dict(), self._held) for optimizer in self.all]
        return states[0] if len(states) == 1 else {str(number): state for number, state in enumerate(states)}

    def _part(self, parameter: Tensor, value: Any) -> Any:
        """The inverse of `_held`, of a whole tensor."""
        piece = self._pieces.get(parameter)
        return (
            piece.cut(value) if piece and isinstance(value, Tensor | Stored) and value.shape == piece.shape else value
        )

    def _of_each(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], change: Callable[[Tensor, Any], Any]
    ) -> dict[str, Any]:
        """A `state_dict` in which each value that belongs to a parameter is changed."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        of_each = {
            number: {name: change(parameters[number], value) for name, value in values.items()}
            for number, values in state["state"].items()
            if number < len(parameters)
        }
        return {**state, "state": of_each}

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
                optimizer.load_state_dict(realized(self._of_each(optimizer, held, self._part)))
            except ValueError as error:
                kind = type(optimizer).__name__
                raise Refused(f"the checkpoint holds the state of another {kind}: {error}") from None
