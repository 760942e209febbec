"""Checkpoints are written in the background, while the training goes on."""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ..config.settings import Checkpoint
from ..core.errors import FULL, RunError
from ..core.ranks import ALONE, World
from ..core.shards import Held, Shard, unsharded
from ..core.state import Snapshot, copy
from . import checkpoint
from .checkpoint import Origin


class Saver:
    """Writes snapshots in the background, one at a time.

    Where ranks hold shards, each has a saver, and all have to call the same methods together. If they see one folder,
    `shared`, each writes its own shards; else rank 0, which alone has an `origin` then, writes what all send to it.

    Attributes:
        origin: whose state it is.
    """

    def __init__(
        self,
        folder: Path,
        origin: Origin | None,
        settings: Checkpoint,
        first: Callable[[], None],
        world: World = ALONE,
        shared: bool = True,
        held: Collection[int] = (),
    ) -> None:
        """`first` is called by rank 0 before each write: it puts on the disk what a checkpoint relies on.

        After `held` numbers of steps the state is kept.
        """
        self.folder, self.origin, self.settings, self.first, self.held = folder, origin, settings, first, held
        self._world, self._in_parts = world, world.size > 1 and shared
        self._thread: threading.Thread | None = None
        self._unsealed: Path | None = None
        self._stated: list[dict[str, Any]] = []
        self._error: Exception | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Copy a state and start writing it; waits first for a snapshot still being written."""
        self.wait()
        if self._in_parts and self._world.is_main:
            checkpoint.clear(self.folder)
        if self._in_parts:
            snapshot = snapshot.digested()  # together: so nobody writes before rank 0 has cleared the folder
            self._unsealed = checkpoint.beside(self.folder, snapshot.step)
            self._begin(partial(self._write_part, snapshot.changed(self._own), self._unsealed))
        else:
            snapshot = snapshot.changed(self._gathered)
            if self.origin:
                self._begin(partial(self._write, snapshot, self.origin))

    def _gathered(self, held: Held) -> Held | None:
        tensor = unsharded(held)
        return copy(tensor) if self.origin else None

    def _own(self, held: Held) -> Held | None:
        mine = self._world.rank < held.world.size if isinstance(held, Shard) else self.origin  # the first replica's
        return copy(held) if mine else None

    def _begin(self, work: Callable[[], object]) -> None:
        def tried() -> None:
            try:
                work()
            except Exception as error:  # OSError, or safetensors' own for the same full disk
                self._error = error

        self._thread = threading.Thread(target=tried, name="checkpoint")
        self._thread.start()

    def _write(self, snapshot: Snapshot, origin: Origin) -> None:
        self.first()
        checkpoint.write(snapshot, self.folder, origin, self.settings.keep, self.held)

    def _write_part(self, snapshot: Snapshot, aside: Path) -> None:
        if self.origin:
            self.first()
        self._stated = checkpoint.write_part(snapshot, aside, self.origin, self._world)

    @property
    def writing(self) -> bool:
        """Whether this rank is not done with what it writes."""
        return self._thread is not None and self._thread.is_alive()

    def seal(self) -> None:
        """Let rank 0 complete a checkpoint of which every rank has written its part."""
        if not self._unsealed:
            return
        aside, self._unsealed = self._unsealed, None
        stated, errors = zip(*self._world.gather((self._stated, self._error and str(self._error))), strict=True)
        failed = {rank: error for rank, error in enumerate(errors) if error}
        if failed and self._world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        if failed:
            rank, error = next(iter(failed.items()))
            self._error = OSError(f"{error} (met by rank {rank})")
        elif self._world.is_main:
            files = [file for part in stated for file in part]
            self._begin(partial(checkpoint.seal, aside, files, self.settings.keep, self.held))

    def wait(self) -> None:
        """Return once nothing is being written."""
        self.join()
        self.seal()
        self.join()

    def join(self) -> None:
        """Return once this rank's thread is done; unlike `wait`, it completes nothing, so a rank may call it alone."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def failure(self) -> RunError | None:
        """Why a snapshot could not be written, told once; None where the run is to go on all the same."""
        if self._unsealed or not self._error:  # one rank's error is to become that of all
            return None
        error, self._error = self._error, None
        there = checkpoint.found(self.folder)
        last = f"the last one is whole, after step {checkpoint.steps_of(there[-1])}" if there else "there is none yet"
        stops = self.settings.on_error == "stop"
        remedy = "Free some space" if any(os.strerror(code) in str(error) for code in FULL) else "Mend that"
        begins = "goes on from it" if there else "begins with step 0"
        then = f"{remedy}, and the same command {begins}" if stops else "The training goes on"
        failure = RunError(f"no checkpoint was written: {error}; {last}. {then}")
        if stops:
            return failure
        if self._world.is_main:
            print(failure, file=sys.stderr, flush=True)
        return None


def seen_by_all(folder: Path, world: World) -> bool:
    """Whether what rank 0 writes into a folder is seen by every rank, wherever that has mounted it."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") if world.is_main else nullcontext() as file:
        name = world.broadcast_object(file and Path(file.name).name)
        return world.total((folder / name).exists()) == [world.size]
