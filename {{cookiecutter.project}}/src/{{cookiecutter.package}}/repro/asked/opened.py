"""The files of the project that its code opens, so that none is used which no hash covers.

Python tells an audit hook of each file that it opens. Files that a library opens in C, such as safetensors', those of
other programs, and those that are opened while `config.py` is imported, are not seen.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from ..differences import some
from ..errors import Refused
from ..project import Project
from .installed import INSTALLED

MACHINERY = Path(__file__).resolve().parents[1]
_watches: list["_Watch"] = []  # at most one: a hook cannot be taken off again
_resolved = cache(Path.resolve)


class _Watch:
    def __init__(self, project: Project, known: Sequence[Path]) -> None:
        self.root, self.package = _resolved(project.root), _resolved(project.package)
        self.known = [path.resolve() for path in known]
        self.read: dict[str, str] = {}  # a file, named from the root, and the line that opened it
        self.written: set[str] = set()
        self._passed: set[tuple[str, str]] = set()  # folders of whose files none counts, and where they were named

    def opened(self, path: Any, flags: int) -> None:
        if isinstance(path, int):  # a file that is open
            return
        named = os.fsdecode(path)
        here = "" if named.startswith("/") else os.getcwd()  # noqa: PTH109 (pathlib takes longer than all of this)
        place = here, named.rpartition("/")[0]
        if place in self._passed:  # a dataset opens a file for each of its items
            return
        path = Path(named).absolute()
        folder = _resolved(path.parent)
        path = folder / path.name  # a file that is a link keeps its name
        if self._counts_not(path):
            if self._counts_not(folder):
                self._passed.add(place)
            return
        name = path.relative_to(self.root).as_posix()
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL):
            self.written.add(name)
        elif name not in self.written and (line := self._line()):
            self.read.setdefault(name, line)

    def _counts_not(self, path: Path) -> bool:
        """Whether a file, or all of a folder, lies outside the project or where the code may read."""
        return not path.is_relative_to(self.root) or any(path.is_relative_to(known) for known in self.known)

    def _line(self) -> str | None:
        """The line that opens a file for the owner; None where the machinery itself does, or an import.

        The owner's line counts. Where there is none, it is that of a library whose dataset the machinery asks for an
        item, or of a thread.
        """
        frame: FrameType | None = sys._getframe(3)
        by = ""
        while frame:
            if frame.f_code.co_filename.startswith("<frozen importlib"):  # modules are judged by `stages`
                return None
            file = _resolved(Path(frame.f_code.co_filename))
            if file.is_relative_to(MACHINERY):
                return by or None
            if file.is_relative_to(self.package):
                return f"{file.relative_to(self.package)}:{frame.f_lineno}"
            if INSTALLED & set(file.parts):
                by = by or f"{file.parent.name}/{file.name}:{frame.f_lineno}"
            frame = frame.f_back
        return by or "a thread"


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watches:
        path, _, flags = arguments
        _watches[0].opened(path, flags)


def watch(project: Project, known: Sequence[Path]) -> None:
    """From now on, notice the files below the project's root that its code reads, but for `known` files and folders."""
    if not _watches:
        sys.addaudithook(_heard)
    _watches[:] = [_Watch(project, known)]


def know(path: Path) -> None:
    """From now on, let the code read a file or folder that has been checked; a file that is a link, by its own name."""
    for watch in _watches:
        watch.known += [path.resolve(), path.parent.resolve() / path.name]


def unknown() -> dict[str, str]:
    """The files that were read so far, named from the root, each with the line that opened it."""
    return dict(_watches[0].read) if _watches else {}


def require_known(local: bool = False) -> None:
    """Refuse to go on after a file was read that no hash covers. It is `local` where this rank alone may have read it.

    Raises:
        Refused: names those files.
    """
    if _watches and (read := _watches[0].read):
        opened = some([f"{name} (by {line})" for name, line in read.items()])
        raise Refused(
            f"{opened}: opened, but not in the content address: a change there would go unseen. Move it into the "
            f"package, let prepare.py write it, or name it in unhashed.files",
            local,
        )
