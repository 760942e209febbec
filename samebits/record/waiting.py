"""How one waits for a run directory that another process holds, or has held; see `lock`. Few runs need it."""

import os
import sys
import tempfile
import time
from pathlib import Path

from ..core.errors import UserError
from .holder import GONE, LIVES, Holder, machine
from .lock import FREE, HELD, content
from .names import LOCK

SILENT = 120.0  # seconds without a sign of life, after which a holder counts as gone
ENDING = 30.0  # seconds that a killed process may need to give back its memory, and then its lock


class Watch:
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
        named = content(descriptor)
        holder = Holder.named(named)
        here = holder is not None and holder.machine == machine()
        if holder and here and (kernel == HELD or holder.is_near()):
            return self._is_gone(holder, kernel)
        if kernel == FREE and (here or holder is None):
            return True
        return self._is_silent(holder, descriptor, kernel, named)

    def _is_gone(self, holder: Holder, kernel: str) -> bool:
        """Decide by the process, which is or was on this machine."""
        if holder.pid == os.getpid() and holder.is_near():  # what this process could not remove
            return kernel != HELD
        state, patient = holder.state(), time.monotonic() < self._began + ENDING
        if state == LIVES or (kernel == HELD and not patient):
            raise self.refused(holder)
        # a lock that is held all the same is that of a process which ends, or has not written its name yet
        return kernel != HELD and (state == GONE or kernel == FREE or not patient)

    def _is_silent(self, holder: Holder | None, descriptor: int, kernel: str, named: bytes) -> bool:
        """Decide by signs of life: the process is out of sight."""
        who = holder or "a process that the lock file does not name"
        file = os.fstat(descriptor)
        sign = file.st_ino, file.st_mtime_ns, named
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


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
