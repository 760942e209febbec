"""Checkpoints: one folder each, written aside and renamed, verified to the last byte before use.

    checkpoints/000000120-1f0c…/      120 steps done, and the first digits of the manifest's SHA-256
        model.safetensors             weights and buffers
        optimizer.safetensors         the optimizer's tensors
        others.safetensors            tensors of buffers that are not persistent, and of the loop's own objects
        state.json                    all other values, the step, whose state it is
        manifest.json                 size and SHA-256 of the four

The folder's name seals the manifest and the manifest seals the files, so no byte can change unnoticed. No
loader or generator state is kept: the step is all that randomness depends on.
"""

import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..asked import manifest
from ..asked.settings import Checkpoint
from ..errors import Failure, Refused
from ..files import read_json, sync, write_json
from .pieces import load_weights, weights
from .trees import BUFFERS, Stateful, copied, pack, unpack
from .world import World

NAME = re.compile(r"(\d{9})-([0-9a-f]{16})")
SET_ASIDE = "damaged-"
NONE: Mapping[str, Stateful] = MappingProxyType({})


@dataclass(frozen=True)
class Origin:
    """Whose state a checkpoint holds: digests of the content address and of the numeric environments of a run."""

    address: str
    environment: str
    earlier: tuple[str, ...] = ()  # environments in which the run was before it was resumed here

    def require(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse the checkpoint `path`, of this `state`, unless it is this run's."""
        wanted = {"address": [self.address], "environment": [self.environment, *self.earlier]}
        for name, allowed in wanted.items():
            if (seen := state.get(name)) not in allowed:
                raise Refused(
                    f"{path}: made by another run: {name} {str(seen)[:16]} seen, {allowed[-1][:16]} wanted. Another "
                    f"run's weights are never used. Move it away, or begin in another folder with --out"
                )


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that a later step depends on, safe from the steps that follow."""

    step: int  # how many steps are done
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    others: dict[str, Tensor]
    values: dict[str, Any]  # what is no tensor


def take(
    step: int,
    model: nn.Module,
    optimizer: Stateful,
    objects: Mapping[str, Stateful] = NONE,
) -> Snapshot:
    """Copy the state after `step` steps to the CPU; `objects` are the loop's own.

    Where ranks hold pieces, all of them have to ask together, and each gets the whole.

    Raises:
        Refused: the state of an object holds what a checkpoint cannot.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    states = {BUFFERS: _not_persistent(model)} | {name: held.state_dict() for name, held in objects.items()}
    values = {
        "optimizer": pack(optimizer.state_dict(), "optimizer", tensors),
        "others": pack(states, "state", others),
    }
    return Snapshot(step, {name: copied(held) for name, held in weights(model).items()}, tensors, others, values)


def put(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: Stateful,
    objects: Mapping[str, Stateful] = NONE,
) -> None:
    """Give model, optimizer and objects the state of a snapshot.

    Raises:
        Refused: the snapshot is of other objects.
    """
    load_weights(model, snapshot.model)
    held = unpack(snapshot.values["others"], snapshot.others)
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


def _not_persistent(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's `state_dict` leaves out."""
    persistent = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in persistent}


def write(snapshot: Snapshot, folder: Path, origin: Origin, keep: int) -> Path:
    """Write a snapshot and its `origin` durably into `folder`, and only then drop all but the newest `keep`.

    A crash at any instant leaves the older checkpoints whole: the new one appears by a rename, after its
    bytes are on the disk.

    Raises:
        OSError: the disk is full, for example; what was written of the new one is removed.
    """
    aside = folder / f".{snapshot.step:09d}.part"
    for left in folder.glob(".*.part"):  # by a crash
        shutil.rmtree(left, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        save_file(snapshot.model, aside / "model.safetensors")
        save_file(snapshot.optimizer, aside / "optimizer.safetensors")
        save_file(snapshot.others, aside / "others.safetensors")
        whose = {"address": origin.address, "environment": origin.environment}
        write_json(aside / "state.json", {"step": snapshot.step, **whose, **snapshot.values})
        manifest.write(aside)
        for path in aside.iterdir():
            sync(path)
        sync(aside)
        seal = manifest.sha256_file(aside / manifest.NAME)[:16]
        final = folder / f"{snapshot.step:09d}-{seal}"
        if final.exists():
            shutil.rmtree(aside)  # the same state was saved before
        else:
            aside.rename(final)
        sync(folder)
        sync(folder.parent)  # for the entry of `folder` itself
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in found(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def found(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, not yet verified."""
    return sorted(path for path in folder.glob("*") if path.is_dir() and NAME.fullmatch(path.name))


def read(path: Path, origin: Origin) -> Snapshot:
    """A snapshot of the run that `origin` names, after checking every byte.

    Raises:
        Damaged: a byte differs from what was written, or is missing.
        Refused: it is whole, and another run's.
    """
    try:
        named = NAME.fullmatch(path.name)
        if not named or manifest.sha256_file(path / manifest.NAME)[:16] != named[2]:
            raise Failure(f"{path / manifest.NAME}: its SHA-256 does not begin as the folder's name says")
        manifest.require_whole(path, remedy="")
        state = read_json(path / "state.json")
        if state["step"] != int(named[1]):
            raise Failure(f"{path}: holds step {state['step']}")
    except (Failure, OSError, ValueError) as error:
        raise Damaged(str(error)) from None
    origin.require(path, state)
    model, optimizer, others = (load_file(path / f"{part}.safetensors") for part in ("model", "optimizer", "others"))
    values = {key: state[key] for key in ("optimizer", "others")}
    return Snapshot(state["step"], model, optimizer, others, values)


def from_lead(snapshot: Snapshot | None, world: World) -> Snapshot | None:
    """The lead's snapshot, on every rank."""
    if world.size == 1:
        return snapshot

    def shapes(tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def received(tensors: dict[str, Tensor] | None, shapes: dict[str, Any]) -> dict[str, Tensor]:
        shared = {}
        for name, (shape, dtype) in shapes.items():
            tensor = tensors[name] if tensors else torch.empty(shape, dtype=dtype)
            shared[name] = tensor.to(world.device)
            world.broadcast(shared[name])
            shared[name] = shared[name].cpu()  # a device may have no room for them all
        return shared

    outline = snapshot and (
        snapshot.step,
        snapshot.values,
        shapes(snapshot.model),
        shapes(snapshot.optimizer),
        shapes(snapshot.others),
    )
    outline = world.from_lead(outline)
    if outline is None:
        return None
    step, values, model, optimizer, others = outline
    model = received(snapshot.model if snapshot else None, model)
    optimizer = received(snapshot.optimizer if snapshot else None, optimizer)
    others = received(snapshot.others if snapshot else None, others)
    return Snapshot(step, model, optimizer, others, values)


class Damaged(Failure):
    """A checkpoint is not what was written."""


def newest(folder: Path, origin: Origin, tell: Callable[[str], None]) -> Snapshot | None:
    """The newest valid checkpoint; damaged ones are told, set aside and skipped.

    Raises:
        Refused: it is another run's.
    """
    for path in reversed(found(folder)):
        try:
            return read(path, origin)
        except Damaged as damage:
            shutil.rmtree(path.with_name(SET_ASIDE + path.name), ignore_errors=True)  # of an earlier time
            path.rename(path.with_name(SET_ASIDE + path.name))
            tell(f"checkpoint {path.name} is damaged and set aside as {SET_ASIDE}{path.name}: {damage}")
    return None


class Saver:
    """Writes snapshots in the background, one at a time.

    `origin` says whose state it is; `first` is called before each
    write, also in the background: it puts on the disk what a checkpoint relies on.
    """

    def __init__(self, folder: Path, origin: Origin, settings: Checkpoint, first: Callable[[], None]) -> None:
        self.folder, self.origin, self.settings, self.first = folder, origin, settings, first
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Stateful,
        objects: Mapping[str, Stateful] = NONE,
    ) -> None:
        """Copy the state and start writing it; waits first for a snapshot still being written."""
        self.wait()
        snapshot = take(step, model, optimizer, objects)
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.first()
            write(snapshot, self.folder, self.origin, self.settings.keep)
        except Exception as error:  # OSError, or safetensors' own for the same full disk
            self._error = error

    def wait(self) -> None:
        """Return once nothing is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def failure(self) -> Failure | None:
        """Why a snapshot could not be written, told once; None where the run is to go on all the same."""
        error, self._error = self._error, None
        if not error:
            return None
        failure = Failure(f"no checkpoint was written: {error}; the previous one is whole")
        if self.settings.on_error == "stop":
            return failure
        failure.tell()
        return None
