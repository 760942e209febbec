"""One training per run directory: a second one is refused, and what a crash leaves behind keeps nobody out for good.

`run.lock` names who holds the folder. On one machine the kernel knows whether the holder lives, because its record lock
ends with the process. Between machines, and where the file system cannot lock, the holder renews the file's time as a
sign of life; one that gives none for two minutes has lost the folder.
"""

import fcntl
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.files import sync
from ..core.errors import FULL, RunError, UserError
from .holder import Holder
from .names import LOCK

if TYPE_CHECKING:
    from .waiting import Watch

EVERY = 15.0  # seconds between two signs of life
LOOK = 0.5  # seconds between two looks at a holder that may be gone
CONFIRM = 1.0  # seconds in which one of two who begin at once overwrites the other, where nothing can lock

FREE, HELD, CANNOT = "free", "held", "cannot lock"  # what the kernel says

_own: set[tuple[int, int]] = set()  # the lock files of this process: between its own threads the kernel locks nothing


class RunLock:
    """Holds a run directory for this process, from `acquire` to `release`.

    The folder is made where it is missing, and nothing is written outside it. A forked child holds nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._descriptor = -1
        self._watched: Watch | None = None

    def acquire(self) -> None:
        """Take the folder; where the last holder is out of sight, wait up to two minutes for a sign of life.

        Raises:
            UserError: another training holds it, or nothing can be written there.
        """
        self._watched = None
        try:
            while not self._taken():
                time.sleep(LOOK)
        except OSError as error:
            if error.errno in FULL:
                raise  # whoever starts a stage tells it
            raise UserError(
                f"{self.path}: {error.strerror}. The run directory must be a folder that can be written; "
                f"choose another with --out"
            ) from None

    def require(self) -> None:
        """Make sure that the folder is still this process's, before writing there.

        Raises:
            RunError: it was moved, or another training took it over while this one gave no sign of life.
        """
        if not self._is_ours():
            raise RunError(
                f"{self.folder} is no longer this training's: it was moved, or another training took it over while "
                f"this one was suspended or had no disk. Nothing more is written there"
            )

    def release(self) -> None:
        """Give the folder back and remove the lock file, where it is still this process's."""
        if self._descriptor < 0 or os.getpid() != self._holder.pid:
            return
        self._stop.set()
        self._signs.join()
        if self._is_ours():
            with suppress(OSError):
                self.path.unlink()
        _own.discard(_identity(os.fstat(self._descriptor)))
        os.close(self._descriptor)  # which ends the lock, so the file is gone by then
        self._descriptor = -1

    def _watch(self) -> "Watch":
        """What this process has seen of another holder, from the first look on."""
        from .waiting import Watch  # which few runs need

        self._watched = self._watched or Watch(self.path)
        return self._watched

    def _taken(self) -> bool:
        """Try once; False: look again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # asked by name, for closing a second descriptor would end the first's lock
            if _identity(self.path.stat()) in _own:
                raise self._watch().refused("this very process")
        descriptor, created = _opened(self.path)
        try:
            kernel = _lock(descriptor)
            if (created and kernel != HELD) or self._watch().is_free(descriptor, kernel):
                if kernel != HELD:
                    return self._claim(descriptor, kernel)
                # locked by a machine that is gone: another file can be had
                if _identity(self.path.stat()) == _identity(os.fstat(descriptor)):
                    self.path.unlink()
            return False
        finally:
            if descriptor != self._descriptor:
                os.close(descriptor)

    def _claim(self, descriptor: int, kernel: str) -> bool:
        """Write this process's name into the file; whether it stands there, in the folder."""
        self._holder = Holder.this()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self._holder.content(), 0)
        sync(descriptor)  # for other machines to see
        if kernel == CANNOT:
            time.sleep(CONFIRM)
        self._descriptor = descriptor
        if not self._is_ours():
            self._descriptor = -1
            return False
        _own.add(_identity(os.fstat(descriptor)))
        self._stop = threading.Event()
        self._signs = threading.Thread(target=self._live, args=(descriptor,), name=LOCK, daemon=True)
        self._signs.start()
        return True

    def _is_ours(self) -> bool:
        """Whether the file in the folder is the one that is open here, and names this process."""
        try:
            here = _identity(self.path.stat()) == _identity(os.fstat(self._descriptor))
            return here and Holder.named(content(self._descriptor)) == self._holder
        except OSError:
            return False

    def _live(self, descriptor: int) -> None:
        while not self._stop.wait(EVERY):
            with suppress(OSError):  # the disk may be out of reach for a while
                os.utime(descriptor)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor of the lock file, and whether this call made the file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), False


def _lock(descriptor: int) -> str:
    """Ask the kernel for the lock: it was FREE, and is this process's now; or another's; or the system CANNOT lock."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return HELD
    except OSError:  # ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL: file systems have many words for it
        return CANNOT
    return FREE


def content(descriptor: int) -> bytes:
    """What stands in an open lock file."""
    return os.pread(descriptor, 4096, 0)


def _identity(file: os.stat_result) -> tuple[int, int]:
    """What tells a file from all others: device and inode."""
    return file.st_dev, file.st_ino
