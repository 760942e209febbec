"""The process of a stage becomes the same command again, and by that gives back all memory that it holds.

Its number, and the process that started it, stay: no launcher notices. What the stage has changed of the variables, the
folder and the cores of its process is as it was when the command began, for the environment of a run is made of them.
"""

import atexit
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..address import loaded
from ..base.project import Project
from ..config.params import PARAMS
from ..core.errors import Preempted

VARIABLE = "SAMEBITS_ANEW"  # what the process hands on, as JSON
COUNT = "TORCHELASTIC_RESTART_COUNT"  # ranks of another count meet apart from each other


class Anew(Preempted):
    """The state is saved, and this process is to become its command again.

    Attributes:
        handed: what that command gets.
    """

    def __init__(self, message: str, handed: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.handed = handed

    def report(self) -> None:
        """Say it once; the note that ranks of a host leave for each other is for a failure to come."""
        if not self._reported and os.environ.get("RANK", "0") == "0":
            print(self, file=sys.stderr, flush=True)
        self._reported = True


@dataclass(frozen=True)
class _Begun:
    """What a command was started with."""

    variables: dict[str, str]
    folder: str
    cores: set[int]
    files: dict[int, str]  # those that whoever started it has left open for it, by their numbers
    params: bytes


_begun: list[_Begun] = []  # at most one
_handed: dict[str, Any] = {}


def remember(project: Project) -> None:
    """A command begins; take what the one before has handed on to it."""
    _handed.clear()
    _handed.update(json.loads(os.environ.pop(VARIABLE, "") or "{}"))
    files = {number: file for number, file in _files().items() if os.get_inheritable(number)}
    _begun[:] = [_Begun(dict(os.environ), os.getcwd(), os.sched_getaffinity(0), files, _params(project))]  # noqa: PTH109


def handed() -> Mapping[str, Any]:
    """What this command has got from the one before; nothing where there was none."""
    return _handed


def is_possible(project: Project) -> bool:
    """Whether the same command would go on, which it does once: code and params.yaml are as when it began."""
    return bool(_begun) and not _handed and _begun[0].params == _params(project) and loaded.is_unchanged(project)


def become(failure: Anew) -> NoReturn:
    """End all that runs in this process, as its end does, and start the same command in its place."""
    threading._shutdown()  # type: ignore[attr-defined]  # both as multiprocessing ends its forks
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    (begun,) = _begun
    variables = begun.variables | {VARIABLE: json.dumps(failure.handed)}
    if "RANK" in variables:
        variables[COUNT] = str(~int(variables.get(COUNT, "0")))  # no other start has this one
    for number, file in _files().items():  # such as those of a GPU: its memory is held as long as they are open
        if begun.files.get(number) != file and number > sys.stderr.fileno():
            os.set_inheritable(number, False)
    os.chdir(begun.folder)
    with suppress(OSError):  # they are no longer this process's
        os.sched_setaffinity(0, begun.cores)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def _params(project: Project) -> bytes:
    path = project.root / PARAMS
    return path.read_bytes() if path.is_file() else b""


def _files() -> dict[int, str]:
    """The files that are open, by their numbers."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)  # noqa: PTH115
        except OSError:  # that of this very look
            continue
    return found
