"""All that must not matter to a run, and how a process that trains a part of it again has it otherwise.

A new row is one entry of `ROWS`: it changes the variables that the process starts with, or the process itself before
it loads torch.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.files import read_json, write_json
from ..start import trainings

Variables = dict[str, str]
KEPT = "PATH", "PYTHONPATH", "VIRTUAL_ENV", "REPRO_IMAGE", "CUDA_VISIBLE_DEVICES"  # lead to programs and libraries
KEPT_PREFIXES = "SAMEBITS_", "LD_", "NVIDIA_"  # so do these
OWN_ROWS = "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL"  # variables that other rows change
ZONES = "SBT-13:45", "SBT+9:30"
LANGUAGES = "C", "C.UTF-8"
HOST = "another-host"
NOTE = "not-tried.json"
CORES, VARIABLES = "number of cores", "environment variables"
NEW_USERS, NEW_NAMES = 0x10000000, 0x04000000  # CLONE_NEWUSER and CLONE_NEWUTS of unshare(2)


@dataclass(frozen=True)
class Row:
    """A circumstance.

    Attributes:
        name: what it is.
        means: what a run that depends on it does, as a rule, and what to do in its place.
        variables: changes those of the process; is given a new folder, too.
        become: changes the process itself, and all that it forks; returns why it cannot.
    """

    name: str
    means: str
    variables: Callable[[Variables, Path], Variables] = lambda variables, folder: variables
    become: Callable[[], str] | None = None


def _recorded(variables: Variables, folder: Path) -> Variables:
    """Those alone that the record of a run holds, that lead to programs and libraries, or that other rows change."""
    from ..environment.environment import NAMES, PREFIXES  # which loads torch

    exact, prefixes = {*NAMES, *KEPT, *OWN_ROWS}, (*PREFIXES, *KEPT_PREFIXES)
    return {name: value for name, value in variables.items() if name in exact or name.startswith(prefixes)}


def _place(name: str) -> Callable[[Variables, Path], Variables]:
    def changed(variables: Variables, folder: Path) -> Variables:
        (folder / name).mkdir(exist_ok=True)
        return variables | {name: str(folder / name)}

    return changed


def _other(name: str, values: Sequence[str], without: str = "") -> Callable[[Variables, Path], Variables]:
    def changed(variables: Variables, folder: Path) -> Variables:
        value = next(each for each in values if each != variables.get(name))
        return {each: held for each, held in variables.items() if each != without} | {name: value}

    return changed


def _umask() -> str:
    before = os.umask(0o077)
    if before == 0o077:
        os.umask(0o027)
    return ""


def _cores() -> str:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        return "there is one core"
    os.sched_setaffinity(0, cores[-1:])
    os.cpu_count = lambda: 1  # which heeds no affinity
    return ""


def _host() -> str:
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    try:
        if libc.unshare(NEW_NAMES) and libc.unshare(NEW_USERS | NEW_NAMES):
            return os.strerror(ctypes.get_errno())
        if os.getuid() != user:  # in a namespace of its own it is nobody until it says who
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        socket.sethostname(HOST)
    except OSError as error:
        return str(error.strerror)
    return ""


def _listings() -> str:
    """The names in a folder come in reverse order."""
    listed, scanned = os.listdir, os.scandir

    def listdir(*path: Any) -> list[Any]:
        return sorted(listed(*path), reverse=True)

    class Scan:
        def __init__(self, *path: Any) -> None:
            with scanned(*path) as entries:
                self._entries: Iterator[Any] = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self._entries)

        def __enter__(self) -> Iterator[Any]:
            return self

        def __exit__(self, *error: Any) -> None:
            self.close()

        def close(self) -> None:
            self._entries = iter(())

    os.listdir, os.scandir = listdir, Scan  # type: ignore[assignment]
    return ""


ROWS = (
    Row(VARIABLES, "it reads a variable: make it a key of params.yaml, or list it in environment.variables", _recorded),
    Row("HOME", "it reads a file there: let prepare.py write it", _place("HOME")),
    Row("TMPDIR", "it keeps something there: give it to run.steps(state=...)", _place("TMPDIR")),
    Row("TZ", "it reads the clock: make the time a key of params.yaml", _other("TZ", ZONES)),
    Row("LANG", "it reads or sorts text by the language: name the encoding", _other("LANG", LANGUAGES, "LC_ALL")),
    Row("umask", "it reads the mode of a file that it wrote", become=_umask),
    Row(CORES, "it counts the cores: make their number a key of params.yaml", become=_cores),
    Row("host name", "it reads the host's name: make it a key of params.yaml", become=_host),
    Row("order of files in a folder", "it lists a folder: sort the names", become=_listings),
)


def started(
    rows: Sequence[Row], variables: Mapping[str, str], folder: Path, own: Collection[str] = ()
) -> tuple[list[str], Variables]:
    """The command of a process that has these circumstances changed and forks trainings, and its variables.

    `folder` is a new one; `missed` reads there which could not be had. Variables named in `own` stay as they are.
    """
    found = dict(variables)
    for row in rows:
        found = row.variables(found, folder) | {name: value for name, value in variables.items() if name in own}
    return trainings.command(trainings.SETTING, {}, folder / NOTE, *(row.name for row in rows)), found


def missed(folder: Path) -> dict[str, str] | None:
    """The circumstances that the process could not change, each with the reason; None before it has begun."""
    path = folder / NOTE
    return read_json(path, dict[str, str]) if path.is_file() else None


def _begin(note: str, *names: str) -> None:
    """Change this process, and only then load torch: threads would have the old circumstances."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends, the run is not what the kernel ends
    missed = {row.name: why for row in ROWS if row.become and row.name in names and (why := row.become())}
    from ..start import warm

    warm.load()
    write_json(Path(note), missed)
    warm.serve()


if __name__ == "__main__":
    _begin(*sys.argv[1:])
