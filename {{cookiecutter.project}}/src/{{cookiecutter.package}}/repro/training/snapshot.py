"""The state of a training after a step: taken, and given back, bit by bit."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..differences import some
from ..errors import Failure, Refused
from .digest import held_digests
from .optimizers import Optimizers
from .pieces import Held, Piece, load_weights, weights
from .trees import BUFFERS, Stateful, copied, pack, realized, unpack

GROUPS = "model", "optimizer", "others"  # of tensors
NONE: Mapping[str, Stateful] = MappingProxyType({})


@dataclass(frozen=True)
class Snapshot:
    """Everything that a later step depends on.

    Attributes:
        step: how many steps are done.
        model, optimizer, others: tensors by name, `Held` where they were taken, `Stored` where they were read.
        values: what is no tensor.
        digests: of each tensor, in hex, by group and name; none where they are not known yet.
    """

    step: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    others: Mapping[str, Any]
    values: Mapping[str, Any]
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """A digest of all, in hex."""
        told = {"step": self.step, "digests": self.digests, **self.values}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def digested(self) -> "Snapshot":
        """With digests; where ranks hold pieces, all have to ask together."""
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
    return held.of(copied(held.local)) if isinstance(held, Piece) else copied(held)


def look(step: int, model: nn.Module, optimizer: Stateful, objects: Mapping[str, Stateful] = NONE) -> Snapshot:
    """The state after `step` steps, with `objects` of the loop's own. Later steps change its tensors: `changed(copy)`.

    Raises:
        Refused: the state of an object holds what a checkpoint cannot.
    """
    tensors: dict[str, Held] = {}
    others: dict[str, Held] = {}
    states = {BUFFERS: _not_persistent(model)} | {name: held.state_dict() for name, held in objects.items()}
    values = {
        "optimizer": pack(optimizer.state_dict(), "optimizer", tensors),
        "others": pack(states, "state", others),
    }
    return Snapshot(step, weights(model), tensors, others, values)


def put(snapshot: Snapshot, model: nn.Module, optimizer: Optimizers, objects: Mapping[str, Stateful] = NONE) -> None:
    """Give model, optimizer and objects the state of a snapshot.

    Raises:
        Refused: the snapshot is of other objects.
        Failure: the state is not the one that was saved, by the digests of model and optimizer.
    """
    load_weights(model, snapshot.model)
    held = realized(unpack(snapshot.values["others"], snapshot.others))
    buffers = held.pop(BUFFERS)
    if held.keys() != objects.keys():
        seen, wanted = (", ".join(sorted(names)) or "none" for names in (held, objects))
        raise Refused(f"the checkpoint holds these objects of the loop: {seen}; run.steps(state=...) names: {wanted}")
    for name, other in objects.items():
        other.load_state_dict(held[name])
    with torch.no_grad():
        for name, buffer in _not_persistent(model).items():
            buffer.copy_(buffers[name])
    optimizer.load_state_dict(unpack(snapshot.values["optimizer"], snapshot.optimizer))
    if snapshot.digests:
        _require_restored(snapshot, look(snapshot.step, model, optimizer).digested())


def _require_restored(wanted: Snapshot, seen: Snapshot) -> None:
    for group in ("model", "optimizer"):
        here = seen.digests[group]
        if differing := [name for name, digest in wanted.digests[group].items() if here.get(name) != digest]:
            raise Failure(
                f"the checkpoint after step {wanted.step}: {group}: {some(differing, 3)}: other bits after loading "
                f"than were saved. load_state_dict changed them, such as their dtype, or this hardware did"
            )


def _not_persistent(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's `state_dict` leaves out."""
    persistent = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}
