"""The optimizers of a run as one: their groups, their state, and the checkpoint that holds it.

A checkpoint holds the state of each parameter under the parameter's name, with its shape. torch counts parameters in
the order in which an optimizer was given them, and a set of tensors has another order in each process.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import UserError, some
from .shards import Held, Shard, Stored, unsharded
from .trees import details, is_plain, realized

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

# Optimizers that one gradient per step cannot serve.
UNFIT = {
    "LBFGS": "makes backward passes of its own, by a closure, whose gradients no rank sums. Use another optimizer",
    "SparseAdam": "wants sparse gradients, which cannot be summed here. Use Adam, with sparse=False in embeddings",
}


WANTED = "one or several of torch.optim wanted"


class Optimizers:
    """One optimizer or several, each with parameters of its own; their groups are brought into the model's order.

    Attributes:
        all: the optimizers, in the order in which `run.steps` was given them.
    """

    def __init__(self, given: Given, model: nn.Module) -> None:
        self._model = model
        self.all = (given,) if isinstance(given, torch.optim.Optimizer) else tuple(given)
        for optimizer in self.all:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UserError(f"run.steps(): a {type(optimizer).__name__} given among the optimizers, {WANTED}")
            for kind in type(optimizer).__mro__:
                if kind.__name__ in UNFIT and kind.__module__.startswith("torch.optim"):
                    raise UserError(f"{type(optimizer).__name__} {UNFIT[kind.__name__]}")
        if not self.all:
            raise UserError(f"run.steps(): no optimizer given, {WANTED}")
        self._updated: dict[Tensor, Tensor] = {}
        self._shards: dict[Tensor, Shard] = {}
        held = self.parameters
        self._checked = [*map(id, held)]
        if twice := len(held) - len({id(parameter) for parameter in held}):
            raise UserError(f"{twice} parameters are held by two optimizers; give each parameter to one of them")
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        if foreign := [parameter for parameter in held if id(parameter) not in places]:
            raise UserError(
                f"the optimizer holds {len(foreign)} parameters that are not the model's, the first of shape "
                f"{tuple(foreign[0].shape)}: give run.steps() the model whose parameters the optimizer was given"
            )
        for group in self.param_groups:  # so nothing depends on the order, such as draws for each parameter in turn
            order = sorted(range(len(group["params"])), key=[places[id(p)] for p in group["params"]].__getitem__)
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:] = [group[key][place] for place in order]

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

    def cut(self, shards: Mapping[Tensor, Shard]) -> dict[Tensor, Tensor]:
        """Have the optimizers update this rank's shards of parameters, vectors that share their memory.

        Returns:
            What is updated in place of each parameter; its `.grad` is what the optimizer uses.
        """
        held = [parameter for parameter in self.parameters if parameter in shards]
        updated: dict[Tensor, Tensor] = {p: nn.Parameter(shards[p].local) for p in held}
        self._updated = updated
        self._shards = {updated[parameter]: shards[parameter] for parameter in held}
        self.replace(updated)
        for optimizer in self.all:  # some have state from the beginning
            for parameter, state in optimizer.state.items():
                state.update({name: self._part(parameter, value) for name, value in state.items()})
        return updated

    def state_of(self, parameter: Tensor) -> list[Held]:
        """Return the tensors that an optimizer keeps for this parameter of the model.

        Raises:
            UserError: one has no digest and no checkpoint can hold it.
        """
        parameter = self._updated.get(parameter, parameter)
        states = [optimizer.state[parameter] for optimizer in self.all if parameter in optimizer.state]
        values = [pair for state in states for pair in state.items() if isinstance(pair[1], Tensor)]
        for name, value in values:
            if not isinstance(value, DTensor) and not is_plain(value):
                raise UserError(
                    f"{name} in the state of the optimizer: expected a strided tensor in memory, got a "
                    f"{type(value).__name__}{details(value)}. No checkpoint can hold it. Keep a dense tensor"
                )
        return [self._held(parameter, value) for _, value in values]

    def _held(self, parameter: Tensor, value: Any) -> Any:
        """A value of the state of a parameter; as a shard where it is one."""
        shard = self._shards.get(parameter)
        return shard.of(value) if shard and isinstance(value, Tensor) and value.shape == parameter.shape else value

    def _part(self, parameter: Tensor, value: Any) -> Any:
        """The inverse of `_held`, of a whole tensor."""
        shard = self._shards.get(parameter)
        return (
            shard.cut(value) if shard and isinstance(value, Tensor | Stored) and value.shape == shard.shape else value
        )

    def _laid(self, parameter: Tensor, value: Any) -> Any:
        """`_part`, laid out in memory as the parameter is: fused kernels take elements by their place there."""
        value = self._part(parameter, value)
        if parameter.is_contiguous() or getattr(value, "shape", None) != parameter.shape:
            return value
        return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(unsharded(value))

    def _names(self) -> dict[int, tuple[str, list[int]]]:
        """Name and shape in the model of what the optimizers update, by its id; tied parameters have the first name."""
        named = self._model.named_parameters()
        return {id(self._updated.get(p, p)): (name, list(p.shape)) for name, p in named}

    def state_dict(self) -> dict[str, Any]:
        """The state of one optimizer, by names, with shards where there are; of several, under their numbers."""
        self.require_named()
        states = [self._named(optimizer) for optimizer in self.all]
        return states[0] if len(states) == 1 else {str(number): state for number, state in enumerate(states)}

    def _named(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """A `state_dict` of torch's, with names of parameters in place of their numbers."""
        given, names = optimizer.state_dict(), self._names()
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        groups = [
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": dict(names[id(parameter)] for parameter in here["params"])}
            for group, here in zip(given["param_groups"], optimizer.param_groups, strict=True)
        ]
        of_each = {
            names[id(held[number])][0]: {key: self._held(held[number], value) for key, value in values.items()}
            for number, values in given["state"].items()
            if number in range(len(held))
        }
        more = {key: value for key, value in given["state"].items() if key not in range(len(held))}
        return {**given, "state": of_each, "more": more, "param_groups": groups}

    def require_named(self) -> None:
        """Refuse parameters that a step has given to an optimizer and that are not the model's.

        Raises:
            UserError: no checkpoint could name them.
        """
        ids = [*map(id, self.parameters)]
        if ids == self._checked:
            return
        names, self._checked = self._names(), ids
        if foreign := [parameter for parameter in self.parameters if id(parameter) not in names]:
            raise UserError(
                f"an optimizer was given a parameter of shape {tuple(foreign[0].shape)} after run.steps() that is not "
                f"the model's: no checkpoint can name it. Make it part of the model"
            )

    def require(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of other optimizers, before anything of it is loaded.

        The state may have groups that were added in a step, of parameters that no optimizer has here.

        Raises:
            UserError: their number differs, or the parameters of a group do, by name or shape.
        """
        states = _each(state)
        if len(states) != len(self.all):
            raise UserError(f"optimizers: the checkpoint holds {len(states)}, run.steps() was given {len(self.all)}")
        held = {id(parameter) for parameter in self.parameters}
        free = dict(shape for key, shape in self._names().items() if key not in held)
        for optimizer, saved in zip(self.all, states, strict=True):
            theirs, ours = ([group["params"] for group in of["param_groups"]] for of in (saved, self._named(optimizer)))
            ours += [{name: free[name] for name in added if name in free} for added in theirs[len(ours) :]]
            for number, (there, here) in enumerate(zip_longest(theirs, ours, fillvalue=dict[str, Any]())):
                if odd := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
                    seen, wanted = (side.get(odd[0], "none") for side in (here, there))
                    raise UserError(
                        f"{type(optimizer).__name__}, group {number}: {some(odd, 3)}: other parameters than the "
                        f"checkpoint holds: shape {seen} here, {wanted} there. Give the optimizer the parameters that "
                        f"it had, or begin in another folder with --out"
                    )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave. The groups stay the same objects, which a loop may hold.

        Raises:
            UserError: it is the state of other optimizers.
        """
        self.require(state)
        for optimizer, saved in zip(self.all, _each(state), strict=True):
            self._load(optimizer, dict(saved))

    def _load(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        names, of_model = self._names(), dict(self._model.named_parameters())
        groups, states = optimizer.param_groups, optimizer.state
        for group in saved["param_groups"][len(groups) :]:  # an earlier step has added them
            named = [(name, of_model[name]) for name in group["params"]]
            params = named if "param_names" in groups[0] else [parameter for _, parameter in named]
            optimizer.add_param_group({**realized(group), "params": params})
        held = {names[id(parameter)][0]: parameter for group in groups for parameter in group["params"]}
        numbers = {name: number for number, name in enumerate(held)}
        of_each = {
            numbers[name]: {key: realized(self._laid(held[name], value)) for key, value in values.items()}
            for name, values in saved["state"].items()
        }
        given = [
            {**group, "params": [numbers[names[id(parameter)][0]] for parameter in here["params"]]}
            for group, here in zip(saved["param_groups"], groups, strict=True)
        ]
        more = realized(saved.pop("more"))
        optimizer.load_state_dict({**realized(saved), "state": of_each | more, "param_groups": realized(given)})
        written: dict[int, Tensor] = {}
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            if group is not loaded:
                kept = {key: _into(group.get(key), value, written) for key, value in loaded.items()}
                group.clear()
                group.update(kept)
        if states is not optimizer.state:
            loaded_states = dict(optimizer.state)
            states.clear()
            states.update(loaded_states)
        optimizer.param_groups, optimizer.state = groups, states
        for parameter, number in zip(held.values(), numbers.values(), strict=True):
            for key, value in of_each.get(number, {}).items():
                there = states[parameter].get(key)
                if isinstance(there, Tensor) and there.dtype != value.dtype:  # torch gives it the parameter's
                    states[parameter][key] = value.to(there.device)


def _into(held: Any, value: Any, written: dict[int, Tensor]) -> Any:
    """A value of a group. A tensor is written into that which is there: the loop or other groups may hold it, too."""
    if not (isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape):
        return value
    if id(held) in written and not torch.equal(held, value):  # since then the loop has given the groups one each
        return value
    with torch.no_grad():
        written[id(held)] = held.copy_(value)
    return held


def _each(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of all optimizers, of which one stands without its number."""
    return [state] if "param_groups" in state else list(state.values())
