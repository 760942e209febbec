"""Checkpoints: one folder each, written aside and renamed, verified to the last byte before use.

    checkpoints/000000120-1f0c…/      120 steps done, and the first digits of the manifest's SHA-256
        model.safetensors             weights and buffers
        optimizer.safetensors         the optimizer's tensors
        others.safetensors            tensors of buffers that are not persistent, and of the loop's own objects
        state.json                    all other values, the step, why it is the last one, whose state it is; digests
        manifest.json                 size and SHA-256 of the others

Where ranks hold shards of weights or of the optimizer's state, and see one folder, each writes its own beside them,
such as model-00001.safetensors (see `stored`). The digest of all, `content`, is the same however many hold the state.

The folder's name seals the manifest and the manifest seals the files, so no byte can change unnoticed. No
loader or generator state is kept: the step is all that randomness depends on.
"""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..address import manifest
from ..base.files import PART, part, rename, sync, write_json
from ..base.text import some
from ..core.alike import together
from ..core.errors import RunError, UserError
from ..core.ranks import ALONE, World
from ..core.state import GROUPS, VALUES, Snapshot
from ..record.removal import CHECKPOINT as NAME
from ..record.removal import VALUES as STATE
from ..record.removal import remove_checkpoint
from . import stored

SET_ASIDE = "damaged-"


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
                raise UserError(
                    f"{path}: made by another run: {name} {str(seen)[:16]} seen, {allowed[-1][:16]} wanted. Another "
                    f"run's weights are never used. Move it away, or begin in another folder with --out"
                )


def write(snapshot: Snapshot, folder: Path, origin: Origin, keep: int, held: Collection[int] = ()) -> Path:
    """Write a snapshot and its `origin` durably into `folder`, and only then `drop` others.

    A crash at any instant leaves the older checkpoints whole: the new one appears by a rename, after its
    bytes are on the disk.

    Raises:
        OSError: the disk is full, for example; what was written of the new one is removed.
    """
    clear(folder)
    aside = beside(folder, snapshot.step)
    try:
        return seal(aside, write_part(snapshot, aside, origin, ALONE), keep, held)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def beside(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name."""
    return part(folder / f".{step:09d}")


def clear(folder: Path) -> None:
    """Remove what a crash has left."""
    for left in folder.glob(f".{'[0-9]' * 9}{PART}"):
        shutil.rmtree(left, ignore_errors=True)


def write_part(snapshot: Snapshot, aside: Path, origin: Origin | None, world: World) -> list[dict[str, Any]]:
    """Write durably what this rank has to: its shards; and rank 0, which knows the `origin`, all else.

    Returns:
        The files as a manifest states them.
    """
    aside.mkdir(parents=True, exist_ok=True)
    written = [path for group in GROUPS for path in stored.save(getattr(snapshot, group), aside, group, world)]
    if origin:
        snapshot = snapshot if snapshot.digests else snapshot.digested()
        whose = {"address": origin.address, "environment": origin.environment}
        state = {"digests": snapshot.digests, "content": snapshot.content, **snapshot.values}
        written.append(aside / STATE)
        write_json(written[-1], {"step": snapshot.step, "stopped": snapshot.stopped, **whose, **state})
    for path in written:
        sync(path)
    return manifest.stated(written)


def seal(aside: Path, stated: list[dict[str, Any]], keep: int, held: Collection[int] = ()) -> Path:
    """Give a checkpoint, whose files are `stated`, its manifest and its name; then `drop` others."""
    folder, step = aside.parent, aside.name[1:10]
    files = {"files": sorted(stated, key=lambda file: file["path"])}
    (aside / manifest.NAME).write_text(json.dumps(files, indent=2) + "\n")
    sync(aside / manifest.NAME)
    digest = manifest.sha256_file(aside / manifest.NAME)[:16]
    final = folder / f"{step}-{digest}"
    if final.exists():
        shutil.rmtree(aside)  # the same state was saved before
    else:
        rename(aside, final)
    sync(folder.parent)  # for the entry of `folder` itself
    drop(folder, keep, held)
    return final


def drop(folder: Path, keep: int, held: Collection[int] = ()) -> None:
    """Remove all checkpoints in `folder` but the newest `keep`, and those after `held` numbers of steps."""
    for old in found(folder)[:-keep]:
        if steps_of(old) not in held:
            remove_checkpoint(old)


def steps_of(path: Path) -> int:
    """How many steps a checkpoint has done, by its name."""
    return int(path.name[:9])


def found(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, not yet verified."""
    return sorted(path for path in folder.glob("*") if path.is_dir() and NAME.fullmatch(path.name))


def read(path: Path, origin: Origin | None, share: tuple[int, int] = (0, 1)) -> Snapshot:
    """A snapshot of the run that `origin` names, or of any, after checking it; its tensors are read as they are used.

    `share` is a rank and how many there are: each checks every byte of some of the files.

    Raises:
        Damaged: a byte differs from what was written, or is missing.
        UserError: it is whole, and another run's.
    """
    try:
        named = NAME.fullmatch(path.name)
        if not named or manifest.sha256_file(path / manifest.NAME)[:16] != named[2]:
            raise RunError(f"{path / manifest.NAME}: its SHA-256 does not begin as the folder's name says")
        stated = manifest.read(path)["files"]
        seen, wanted = {file.name for file in path.iterdir()}, {manifest.NAME, *(file["path"] for file in stated)}
        if odd := sorted(seen ^ wanted):
            raise RunError(f"{path}: {some(odd, 3)}: {'missing' if odd[0] in wanted else 'added later'}")
        for file in stated[share[0] :: share[1]]:
            manifest.require_sha256(path / file["path"], file["sha256"], remedy="", check=None)
        state = json.loads((path / STATE).read_text())  # its bytes are known, so it may be as deep and long as it is
        if state["step"] != int(named[1]):
            raise RunError(f"{path}: holds step {state['step']}")
    except (RunError, OSError, ValueError) as error:
        raise Damaged(str(error)) from None
    if origin:
        origin.require(path, state)
    values = {key: state[key] for key in VALUES}
    groups = {group: stored.read(path, group) for group in GROUPS}
    return Snapshot(state["step"], **groups, values=values, digests=state["digests"], stopped=state["stopped"])


def broadcast_object(snapshot: Snapshot | None, world: World) -> Snapshot:
    """Rank 0's snapshot, on every rank; all have to read its tensors together."""
    plain = snapshot and (snapshot.step, snapshot.values, snapshot.digests, snapshot.stopped)
    step, values, digests, stopped = world.broadcast_object(plain)
    groups = {group: stored.broadcast_object(getattr(snapshot, group, None), world) for group in GROUPS}
    return Snapshot(step, **groups, values=values, digests=digests, stopped=stopped)


class Damaged(RunError):
    """A checkpoint is not what was written."""


def newest(
    folder: Path, origin: Origin | None, report: Callable[[str], None], world: World = ALONE, shared: bool = True
) -> Snapshot | None:
    """The newest valid checkpoint, on every rank; damaged ones are told, set aside and skipped.

    Where `shared`, all ranks see the folder: then each checks its share of the files, and reads for itself.

    Raises:
        UserError: it is another run's.
    """
    share = (world.rank, world.size) if shared else (0, 1)
    origin = world.broadcast_object(origin)
    for name in reversed(world.broadcast_object([path.name for path in found(folder)] if origin else [])):
        path = folder / name
        try:
            there = together(world, partial(read, path, origin, share) if shared or world.is_main else lambda: None)
            return there if shared else broadcast_object(there, world)
        except Damaged as damage:
            if world.is_main:
                remove_checkpoint(folder / (SET_ASIDE + name))  # of an earlier time
                path.rename(folder / (SET_ASIDE + name))
                report(f"checkpoint {name} is damaged and set aside as {SET_ASIDE}{name}: {damage}")
    return None


def start_of(folder: Path, content: str, world: World) -> Snapshot:
    """The state of this `content` among the checkpoints in `folder`, with which a run starts; all ranks see the folder.

    Raises:
        UserError: it is not there, or a byte of it differs from what was written.
    """
    for path in reversed(found(folder)):
        try:
            there = together(world, partial(read, path, None, (world.rank, world.size)))
        except Damaged as damage:
            raise UserError(f"{path}: damaged: {damage}. The run starts from it: bring it back") from None
        if there.content == content:
            return there
    raise UserError(f"{folder}: no state {content[:16]} seen, with which this run starts: bring that run's folder back")
