"""Failures that a user can cause: a line or two and an exit code, no traceback."""

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE, LOOK = 2.0, 0.01  # seconds in which rank 0 of a host may speak first; between two looks


class RunError(Exception):
    """Ends the process with `exit_code` after printing its message on standard error.

    Most failures are met by all ranks of a host alike, so one rank speaks for all: the first, or whichever ends before
    it. A `local` one is a rank's own.
    """

    exit_code = 1

    def __init__(self, message: str, local: bool = False) -> None:
        super().__init__(message)
        self.local, self._reported = local, False

    def report(self) -> None:
        """Print the message on standard error, once; one rank of a host speaks for all unless it is local."""
        if self._reported or not (self.local or _speaks(str(self))):
            return
        self._reported = True
        who = f"rank {os.environ.get('RANK', '0')}: " if self.local else ""
        print(f"{who}{self}", file=sys.stderr, flush=True)


def _speaks(message: str) -> bool:
    """Whether this rank is the one of its host that prints a failure of all: rank 0, or the first that ends without it.

    torchrun ends all ranks soon after one has ended, so rank 0 may never come to speak. It gives each rank a file, in a
    folder beside those of the host's other ranks; what is said first is noted there. Without it rank 0 alone speaks.
    """
    local_rank, place = os.environ.get("LOCAL_RANK", "0"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    first = not local_rank.isdecimal() or int(local_rank) == 0  # a malformed one: report the error anyway
    if not place:
        return first
    said, words = Path(place).parent.with_name("said"), message.encode(errors="replace")
    end = time.monotonic() + PATIENCE
    while not first and not said.exists() and time.monotonic() < end:
        time.sleep(LOOK)
    try:
        with said.open("xb") as note:
            note.write(words)
    except FileExistsError:
        return first and said.read_bytes() != words
    except OSError:  # no room, or no such folder
        pass
    return True


class UserError(RunError):
    """The user's input is wrong: say the thing, the value seen, the value wanted and the next step."""

    exit_code = 2


class Disagreement(RunError):
    """Ranks that should be equal are not, or hardware gave two answers to one question."""

    exit_code = 4


class Preempted(RunError):
    """The run stopped early with its state saved: SIGTERM came, or the step of `trace.values` is done."""

    exit_code = 143


class NonFinite(RunError):
    """A gradient is infinite or not a number."""

    exit_code = 3


# The system's word for what is wrong with a file or a folder -> the next step.
NO_PLACE = {
    errno.ENOENT: "restore it, or name another place",
    errno.ENOTDIR: "a folder is wanted where a file is; name another place",
    errno.EISDIR: "a file is wanted where a folder is; move it away, or name another place",
    errno.EEXIST: "a folder is wanted where a file is; move it away, or name another place",
    errno.EACCES: "change its mode so that you may read and write it, or name another place",
    errno.EPERM: "change its owner so that you may read and write it, or name another place",
    errno.EROFS: "the file system is read-only; name another place",
    errno.ELOOP: "links that lead in a circle; name another place",
    errno.ENAMETOOLONG: "a shorter name is wanted",
    errno.ESTALE: "the file system lost it; mount it again, or name another place",
}
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


def of_system(error: OSError) -> RunError | None:
    """The failure that a user can mend by another place or more space; None for one that needs its traceback."""
    if error.errno in FULL:
        return RunError(f"{error}: free some space; the same command goes on from its last checkpoint, if there is one")
    if error.errno in NO_PLACE:
        return UserError(f"{error.filename or 'the current folder'}: {error.strerror}: {NO_PLACE[error.errno]}")
    return None


def some(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
