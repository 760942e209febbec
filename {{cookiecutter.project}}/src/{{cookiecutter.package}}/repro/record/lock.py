"""One training per run directory: a second one is refused, and what a crash leaves behind keeps nobody out for good.

`run.lock` names who holds the folder. On one machine the kernel knows whether the holder lives, because its record lock
ends with the process. Between machines, and where the file system cannot lock, the holder renews the file's time as a
sign of life; one that gives none for two minutes has lost the folder.
"""

import fcntl
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..base.files import sync
from ..core.errors import FULL, RunError, UserError
from .holder import GONE, LIVES, Holder, machine
from .names import LOCK

EVERY = 15.0  # seconds between two signs of life
SILENT = 120.0  # seconds without one, after which a holder counts as gone
ENDING = 30.0  # seconds that a killed process may need to give back its memory, and then its lock
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

    def acquire(self) -> None:
        """Take the folder; where the last holder is out of sight, wait up to two minutes for a sign of life.

        Raises:
            UserError: another training holds it, or nothing can be written there.
        """
        watch = _Watch(self.path)
        try:
            while not self._taken(watch):
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

    def _taken(self, watch: "_Watch") -> bool:
        """Try once; False: look again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # asked by name, for closing a second descriptor would end the first's lock
            if _identity(self.path.stat()) in _own:
                raise watch.refused("this very process")
        descriptor, created = _opened(self.path)
        try:
            kernel = _lock(descriptor)
            if (created and kernel != HELD) or watch.is_free(descriptor, kernel):
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
            return here and Holder.named(_content(self._descriptor)) == self._holder
        except OSError:
            return False

    def _live(self, descriptor: int) -> None:
        while not self._stop.wait(EVERY):
            with suppress(OSError):  # the disk may be out of reach for a while
                os.utime(descriptor)


class _Watch:
    """What a waiter has observed of the lock's holder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic()
        self._looks = 0  # at signs of life

    def refused(self, who: object) -> UserError:
        """That the folder is held, by whom, and what to do about it."""
        return UserError(
            f"{self.path.parent}: another training writes there: {who}. "
            f"Wait for it, end it, or choose another folder with --out"
        )

    def is_free(self, descriptor: int, kernel: str) -> bool:
        """Whether nobody holds the open lock file, of which the kernel says `kernel`. False: look again.

        Raises:
            UserError: its holder lives.
        """
        content = _content(descriptor)
        holder = Holder.named(content)
        here = holder is not None and holder.machine == machine()
        if holder and here and (kernel == HELD or holder.is_near()):
            return self._is_gone(holder, kernel)
        if kernel == FREE and (here or holder is None):
            return True
        return self._is_silent(holder, descriptor, kernel, content)

    def _is_gone(self, holder: Holder, kernel: str) -> bool:
        """Decide by the process, which is or was on this machine."""
        if holder.pid == os.getpid() and holder.is_near():  # what this process could not remove
            return kernel != HELD
        state, patient = holder.state(), time.monotonic() < self._began + ENDING
        if state == LIVES or (kernel == HELD and not patient):
            raise self.refused(holder)
        # a lock that is held all the same is that of a process which ends, or has not written its name yet
        return kernel != HELD and (state == GONE or kernel == FREE or not patient)

    def _is_silent(self, holder: Holder | None, descriptor: int, kernel: str, content: bytes) -> bool:
        """Decide by signs of life: the process is out of sight."""
        who = holder or "a process that the lock file does not name"
        file = os.fstat(descriptor)
        sign = file.st_ino, file.st_mtime_ns, content
        self._looks += 1
        if self._looks == 1:
            # the file's time comes from a clock of the file system's, so the time of a file made now is its measure
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=f".{LOCK}.") as probe:
                self._age = max(0.0, os.fstat(probe.fileno()).st_mtime - file.st_mtime)
            self._first, self._began = sign, time.monotonic()
        elif sign != self._first:
            raise self.refused(who)
        # a lock that is held may be that of one who is about to write its name over an old one
        silent = time.monotonic() - self._began + (0 if kernel == HELD else self._age)
        if silent >= SILENT:
            _report(f"{self.path.parent}: taken over from {who}, which gave no sign of life for {SILENT:.0f} s")
        elif self._looks == 2:  # at the second look, for most have named themselves by then
            _report(f"{self.path.parent}: held by {who}; waiting up to {SILENT - silent:.0f} s for a sign of life")
        return silent >= SILENT


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


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, 4096, 0)


def _identity(file: os.stat_result) -> tuple[int, int]:
    """What tells a file from all others: device and inode."""
    return file.st_dev, file.st_ino


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
