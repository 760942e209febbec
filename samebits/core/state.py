"""The state of a training after a step: taken, and given back, bit by bit."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .attributes import Attributes
from .digest import held_digests
from .errors import RunError, UserError, some
from .optimizers import Given, Optimizers
from .shards import Held, Shard, extras, gradients_held, load_weights, weights
from .trees import Stateful, copied, leaves, pack, realized, require_stateful, unpack

GROUPS = "model", "optimizer", "others"  # of tensors
VALUES = "optimizer", "model", "state"  # what is no tensor: of the optimizers, beside weights, of the loop's objects


@dataclass(frozen=True)
class Snapshot:
    """Everything that a later step depends on.

    Attributes:
        step: how many steps are done.
        model, optimizer, others: tensors by name, `Held` where they were taken, `Stored` where they were read.
        values: what is no tensor.
        digests: of each tensor, in hex, by group and name; none where they are not known yet.
        stopped: why its owner ended the run after this step; None where a further one follows, or all are done.
    """

    step: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    others: Mapping[str, Any]
    values: Mapping[str, Any]
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def content(self) -> str:
        """A digest of all, in hex."""
        stated = {"step": self.step, "stopped": self.stopped, "digests": self.digests, **self.values}
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()

    def digested(self) -> "Snapshot":
        """With digests; where ranks hold shards, all have to ask together."""
        return replace(self, digests={group: _digests(getattr(self, group)) for group in GROUPS})

    def changed(self, change: Callable[[Any], Held | None]) -> "Snapshot":
        """With other tensors in place of these; without those for which there are none."""
        groups: dict[str, Any] = {
            group: {name: new for name, held in getattr(self, group).items() if (new := change(held)) is not None}
            for group in GROUPS
        }
        return replace(self, **groups)


def _digests(tensors: Mapping[str, Held]) -> dict[str, str]:
    found = held_digests([[held] for held in tensors.values()])
    return {name: f"{int(digest) % 2**64:016x}" for name, digest in zip(tensors, found, strict=True)}


def copy(held: Held) -> Held:
    """A copy on the CPU of what this rank holds."""
    return held.of(copied(held.local)) if isinstance(held, Shard) else copied(held)


@dataclass(frozen=True)
class State:
    """What a later step depends on: the model, its optimizers, and `objects` of the loop's own."""

    model: nn.Module
    optimizers: Optimizers
    objects: Mapping[str, Stateful] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, optimizer: Given, objects: Mapping[str, Any]) -> "State":
        """What `run.steps` was given.

        Raises:
            UserError: an optimizer is not the model's, or one of the objects has no state to save.
        """
        return cls(model, Optimizers(optimizer, model), require_stateful(objects))

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Those of the model by name, as the loop begins; from then on none may be replaced."""
        return dict(self.model.named_parameters())

    @cached_property
    def attributes(self) -> Attributes:
        """Those of all modules and optimizers; they begin when they are first asked for."""
        given = self.optimizers.all
        names = ["optimizer"] if len(given) == 1 else [f"optimizers[{number}]" for number in range(len(given))]
        modules = {name: each for name, each in self.objects.items() if isinstance(each, nn.Module)}
        return Attributes({"model": self.model} | modules, dict(zip(names, given, strict=True)))

    def weights(self) -> dict[str, Held]:
        """What the model's `state_dict` holds, buffers included."""
        return weights(self.model)

    def gradients(self) -> dict[str, Held]:
        """The gradients of the parameters that have one, by name."""
        return gradients_held(self.parameters)

    def extras(self) -> dict[str, Any]:
        """What the modules' `get_extra_state` give, under the names that `state_dict` has for it."""
        return extras(self.model)

    def others(self) -> dict[str, Held]:
        """What the objects hold: their tensors, and of each a digest of all else, a scalar of int64."""
        held: dict[str, Held] = {}
        for name, each in self.objects.items():
            place = f"{name}.state_dict()"
            packed = json.dumps(pack(each.state_dict(), place, held), sort_keys=True).encode()
            number = int.from_bytes(hashlib.sha256(packed).digest()[:8], "little", signed=True)
            held[f"{place}, numbers and text"] = torch.tensor(number)
        return held

    def look(self, step: int) -> Snapshot:
        """The state after `step` steps. Later steps change its tensors: `changed(copy)`.

        Raises:
            UserError: the state of an object holds what a checkpoint cannot.
        """
        tensors: dict[str, Held] = {}
        others: dict[str, Held] = {}
        held = {name: {"state": each.state_dict(), **_beside(each)} for name, each in self.objects.items()}
        values = {
            "optimizer": pack(self.optimizers.state_dict(), "optimizer", tensors),
            "model": pack({"extra": self.extras(), **_beside(self.model), **self._plain()}, "model", others),
            "state": pack(held, "state", others),
        }
        return Snapshot(step, self.weights(), tensors, others, values)

    def _plain(self) -> dict[str, Any]:
        saved = self.attributes.saved()
        return {"attributes": saved} if saved else {}

    def put(self, snapshot: Snapshot) -> None:
        """Give model, optimizers and objects the state of a snapshot.

        Raises:
            UserError: the snapshot is of other objects; nothing is loaded then.
            RunError: the state is not the one that was saved.
        """
        self.attributes  # noqa: B018 - they begin before anything is put
        beside, held = (realized(unpack(snapshot.values[of], snapshot.others)) for of in ("model", "state"))
        state = unpack(snapshot.values["optimizer"], snapshot.optimizer)
        if held.keys() != self.objects.keys():
            seen, wanted = (", ".join(sorted(names)) or "none" for names in (held, self.objects))
            raise UserError(
                f"the checkpoint holds these objects of the loop: {seen}; run.steps(state=...) names: {wanted}"
            )
        sides = snapshot.model, self.weights()
        there, here = ({name: tuple(each.shape) for name, each in side.items()} for side in sides)
        if odd := sorted(name for name in there | here if there.get(name) != here.get(name)):
            raise UserError(
                f"the model: {some(odd, 3)}: shape {here.get(odd[0], 'none')} here, {there.get(odd[0], 'none')} "
                f"in the checkpoint. Build the model that the run began with, or begin in another folder with --out"
            )
        self.optimizers.require(state)
        load_weights(self.model, snapshot.model, beside["extra"])
        for name, other in self.objects.items():
            other.load_state_dict(held[name]["state"])
            _put_beside(other, held[name])
        _put_beside(self.model, beside)
        self.optimizers.load_state_dict(state)
        self.attributes.put(beside.get("attributes", {}))
        if snapshot.digests:
            _require_restored(snapshot, self.look(snapshot.step).digested())


def _require_restored(wanted: Snapshot, seen: Snapshot) -> None:
    """Compare all that was saved with what the objects give after loading."""
    saved, here = (
        {f"model {name}": digest for name, digest in each.digests["model"].items()}
        | {name: digest for group in ("optimizer", "others") for name, digest in each.digests[group].items()}
        | {way: value for of in VALUES for way, value in leaves(each.values[of], of)}
        for each in (wanted, seen)
    )
    if differing := [name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name)]:
        raise RunError(
            f"the checkpoint after step {wanted.step}: {some(sorted(differing), 3)}: other bits after loading than "
            f"were saved. load_state_dict changed or lost them, such as their dtype, or this hardware did"
        )


def _beside(held: object) -> dict[str, Any]:
    """What a module's `state_dict` leaves out: buffers, and which of its modules are in evaluation mode."""
    if not isinstance(held, nn.Module):
        return {}
    evaluating = [name for name, module in held.named_modules() if not module.training]
    return {"buffers": _not_persistent(held), "evaluating": evaluating}


def _put_beside(held: object, beside: Mapping[str, Any]) -> None:
    """Give back what `_beside` gave."""
    if not isinstance(held, nn.Module):
        return
    evaluating = set(beside["evaluating"])
    for name, module in held.named_modules():
        module.training = name not in evaluating
    with torch.no_grad():
        for name, buffer in _not_persistent(held).items():
            if name in beside["buffers"]:  # what is missing is found when all is compared
                buffer.copy_(beside["buffers"][name])


def _not_persistent(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's `state_dict` leaves out."""
    persistent = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}
