"""Who holds a run directory, and whether that process still lives, as far as this machine can tell."""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

LIVES, ENDS, GONE = "lives", "ends", "gone"
STATE, FLAGS, THREADS, STARTED, PENDING = 0, 6, 17, 19, 28  # fields of /proc/PID/stat after the name, see proc(5)
PF_EXITING, SIGKILL = 0x4, 1 << 8


@dataclass(frozen=True)
class Holder:
    """A process, as a lock file names it.

    Attributes:
        host: the name of its machine or container, for people.
        machine: what processes under one kernel have in common, whatever their containers are called.
        namespace: where its number holds; a container has a namespace of its own.
        pid: its number.
        started: when it began, in the kernel's count; a later process of the same number has another.
        begun: since when it holds the folder, for people.
    """

    host: str
    machine: str
    namespace: str
    pid: int
    started: str
    begun: str

    @classmethod
    def this(cls) -> Self:
        """This process, from now on."""
        pid, now = os.getpid(), datetime.now(UTC)
        return cls(socket.gethostname(), machine(), namespace(), pid, _started(pid), f"{now:%Y-%m-%d %H:%M:%S UTC}")

    @classmethod
    def named(cls, content: bytes) -> Self | None:
        """Whom the file's content names; None where it is torn, empty or not ours."""
        try:
            holder = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        return holder if {name: type(value) for name, value in asdict(holder).items()} == cls.__annotations__ else None

    def content(self) -> bytes:
        """What `named` reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.begun}"

    def is_near(self) -> bool:
        """Whether its number means anything here: it is or was under this kernel, and in this namespace."""
        return (self.machine, self.namespace) == (machine(), namespace())

    def state(self) -> str:
        """Whether the process LIVES, ENDS (it is killed, and may hold its files for a moment more) or is GONE.

        One in another container counts as living.
        """
        if not self.is_near():
            return LIVES
        try:
            fields = _stat(self.pid)
        except OSError:  # there is none, or it is hidden from other users
            return _signalled(self.pid)
        if fields[STARTED] != self.started or (fields[STATE] in "ZX" and int(fields[THREADS]) <= 1):
            return GONE  # another has its number, or nobody has asked for its exit code yet
        ends = fields[STATE] in "ZX" or int(fields[FLAGS]) & PF_EXITING or int(fields[PENDING]) & SIGKILL
        return ENDS if ends else LIVES


def machine() -> str:
    """The same for all processes under one running kernel; host names may be alike, or change with the container."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def namespace() -> str:
    """The namespace of this process's number."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _started(pid: int) -> str:
    with suppress(OSError):
        return _stat(pid)[STARTED]
    return ""


def _signalled(pid: int) -> str:
    """Whether there is a process to which signals could be sent."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return GONE
    except PermissionError:
        pass
    return LIVES
