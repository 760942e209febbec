"""The files of the project that its own code opens, so that none is used which no hash covers.

Python tells an audit hook of each file that it opens. Files that a library opens in C, such as safetensors', and
those of other programs are not seen.
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

_watches: list["_Watch"] = []  # at most one: a hook cannot be taken off again
_resolved = cache(Path.resolve)


class _Watch:
    def __init__(self, project: Project, known: Sequence[Path]) -> None:
        self.root, self.package, self.machinery = map(_resolved, (project.root, project.package, project.machinery))
        self.known = [path.resolve() for path in known]
        self.read: dict[str, str] = {}  # a file, named from the root, and the line that opened it
        self.written: set[str] = set()

    def opened(self, path: Any, flags: int) -> None:
        if isinstance(path, int):  # a file that is open
            return
        path = Path(os.fsdecode(path)).absolute()
        path = _resolved(path.parent) / path.name  # a file that is a link keeps its name
        if not path.is_relative_to(self.root) or any(path.is_relative_to(known) for known in self.known):
            return
        name = path.relative_to(self.root).as_posix()
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL):
            self.written.add(name)
        elif name not in self.written and (line := self._line()):
            self.read.setdefault(name, line)

    def _line(self) -> str | None:
        """The line of the owner's code that opens a file; None where the machinery, an import or a library does."""
        frame: FrameType | None = sys._getframe(3)
        while frame:
            if frame.f_code.co_filename.startswith("<frozen importlib"):  # modules are judged by `stages`
                return None
            file = _resolved(Path(frame.f_code.co_filename))
            if file.is_relative_to(self.machinery):
                return None
            if file.is_relative_to(self.package):
                return f"{file.relative_to(self.package)}:{frame.f_lineno}"
            frame = frame.f_back
        return None


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watches:
        path, _, flags = arguments
        _watches[0].opened(path, flags)


def watch(project: Project, known: Sequence[Path]) -> None:
    """From now on, notice the files below the project's root that its code reads, but for `known` files and folders."""
    if not _watches:
        sys.addaudithook(_heard)
    _watches[:] = [_Watch(project, known)]


def unknown() -> dict[str, str]:
    """The files that were read so far, named from the root, each with the line of the package that opened it."""
    return dict(_watches[0].read) if _watches else {}


def require_known() -> None:
    """Refuse to go on after a file was read that no hash covers.

    Raises:
        Refused: names those files.
    """
    if _watches and (read := _watches[0].read):
        opened = some([f"{name} (by {line})" for name, line in read.items()])
        raise Refused(
            f"{opened}: opened, but not in the content address: a change there would go unseen. Move it into the "
            f"package, let prepare.py write it, or name it in unhashed.files"
        )
