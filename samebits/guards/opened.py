"""The files of the project that its code opens, so that none is used which no hash covers.

Python tells an audit hook of each file that it opens, from before the owner's first module is imported. Files that a
library opens in C, such as safetensors', and those of other programs are not seen.

In the folder of its own run the code reads only what this run has written: what lies there from before, as after a
kill, is no part of the checkpoint from which the run goes on.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from ..address.address import addressed
from ..address.locks import INSTALLED
from ..base.project import LIBRARY, Project
from ..base.text import some
from ..core.errors import UserError

_watches: list["_Watch"] = []  # at most one
_resolved = cache(Path.resolve)


class _Watch:
    def __init__(self, project: Project, known: Sequence[Path], out: Path | None) -> None:
        self.root, self.package = _resolved(project.root), _resolved(project.package)
        self.known = [path.resolve() for path in known]
        self.code = {_place(str(project.file(name))) for name in addressed(project)}
        self.read: dict[str, str] = {}  # a file, named from the root, and the line that opened it
        self.written: set[str] = set()
        self.out = out.resolve() if out else None
        # the files that lie there from before, as they were; None: whatever was written since, that is still in it
        self.before: dict[Path, tuple[int, ...] | None] = {}
        self.before |= {path: _identity(path) for path in self.out.rglob("*")} if self.out else {}
        self.earlier: dict[str, str] = {}  # those of them that were read, and the line that opened each
        self._passed: set[tuple[str, str]] = set()  # folders of whose files none counts, and where they were named

    def opened(self, path: Any, flags: int) -> None:
        if isinstance(path, int):  # a file that is open
            return
        named = os.fsdecode(path)
        here = "" if named.startswith("/") else os.getcwd()  # noqa: PTH109 (pathlib takes longer than all of this)
        place = here, named.rpartition("/")[0]
        if place in self._passed:  # a dataset opens a file for each of its items
            return
        path = _place(named)
        if self.out and path.is_relative_to(self.out) and not self._known(path):
            return self._opened_own(path, flags)
        if self._counts_not(path):
            if self._counts_not(path.parent):
                self._passed.add(place)
            return
        name = path.relative_to(self.root).as_posix()
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL):
            self.written.add(name)
        elif name not in self.written and path.exists() and (line := self._line()):  # some are only looked for
            self.read.setdefault(name, line)

    def _opened_own(self, path: Path, flags: int) -> None:
        """A file of the run's own folder."""
        if flags & (os.O_TRUNC | os.O_EXCL):
            self.before.pop(path, None)
        elif self._from_before(path):
            if flags & os.O_ACCMODE != os.O_RDONLY:
                self.before[path] = None
            if flags & os.O_ACCMODE != os.O_WRONLY and (line := self._line()):
                name = path.relative_to(self.root) if path.is_relative_to(self.root) else path
                self.earlier.setdefault(str(name), line)

    def renamed(self, path: Path, target: Path) -> None:
        """A file gets another name."""
        if self._from_before(path):
            self.before[target] = None
        else:
            self.before.pop(target, None)
        self.before.pop(path, None)

    def _from_before(self, path: Path) -> bool:
        """Whether a file holds what an earlier process has written; a library may have written it anew in C."""
        was = self.before.get(path, ())
        return was is None or was == _identity(path)

    def _counts_not(self, path: Path) -> bool:
        """Whether a file, or all of a folder, lies outside the project or where the code may read."""
        return not path.is_relative_to(self.root) or self._known(path)

    def _known(self, path: Path) -> bool:
        return path in self.code or any(path.is_relative_to(known) for known in self.known)

    def _line(self) -> str | None:
        """The line that opens a file for the owner; None where the library itself does, or an import.

        The owner's line counts. Where there is none, it is that of a library whose dataset the library asks for an
        item, or of a thread.
        """
        here, by = sys._getframe(), ""
        frame: FrameType | None = here
        while frame and frame.f_code.co_filename == here.f_code.co_filename:
            frame = frame.f_back
        while frame:
            if frame.f_code.co_filename.startswith("<frozen importlib"):  # modules are judged by `stages`
                return None
            file = _resolved(Path(frame.f_code.co_filename))
            if file.is_relative_to(LIBRARY):
                return by or None
            if file.is_relative_to(self.package):
                return f"{file.relative_to(self.package)}:{frame.f_lineno}"
            if INSTALLED & set(file.parts):
                by = by or f"{file.parent.name}/{file.name}:{frame.f_lineno}"
            frame = frame.f_back
        return by or "a thread"


def _place(named: str) -> Path:
    path = Path(named).absolute()
    return _resolved(path.parent) / path.name  # a file that is a link keeps its name


def _identity(path: Path) -> tuple[int, ...]:
    """What changes with a file: its size, dates and inode; of none where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return (0,)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watches:
        path, _, flags = arguments
        _watches[0].opened(path, flags)
    elif event == "os.rename" and _watches and _watches[0].before:
        path, target, *_ = arguments
        if not isinstance(path, int) and not isinstance(target, int):
            _watches[0].renamed(_place(os.fsdecode(path)), _place(os.fsdecode(target)))


@cache  # a hook cannot be taken off again
def _listen() -> None:
    sys.addaudithook(_heard)


def watch(project: Project, known: Sequence[Path], out: Path | None = None) -> None:
    """From now on, notice the files below the project's root that its code reads.

    It may read the files of the content address and the `known` files and folders; and in `out`, the folder of its run,
    what is written there from now on.
    """
    _listen()
    _watches[:] = [_Watch(project, known, out)]


@contextmanager
def unnoticed() -> Iterator[None]:
    """What is opened inside, the library opens for itself."""
    watches, _watches[:] = [*_watches], []
    try:
        yield
    finally:
        _watches[:] = watches


def know(path: Path) -> None:
    """Let the code read a file or folder that has been checked, earlier, too; one that is a link, by its own name."""
    for watch in _watches:
        watch.known += [path.resolve(), path.parent.resolve() / path.name]
        watch.read = {name: line for name, line in watch.read.items() if not watch._known(watch.root / name)}


def unknown() -> dict[str, str]:
    """The files that were read so far, named from the root, each with the line that opened it."""
    return dict(_watches[0].read) if _watches else {}


def require_known(local: bool = False) -> None:
    """Refuse to go on after a file was read that no hash covers, or that the run has from before.

    It is `local` where this rank alone may have read it.

    Raises:
        UserError: names those files.
    """
    if _watches and (read := _watches[0].read):
        raise UserError(
            f"{_some(read)}: opened, but not in the content address: a change there would go unseen. Move it into the "
            f"package (no name there may begin with . or end with ~), let prepare.py write it, or name it in "
            f"unhashed.files",
            local,
        )
    if _watches and (earlier := _watches[0].earlier):
        raise UserError(
            f"{_some(earlier)}: opened, but written before this process began, by an earlier or an interrupted run: no "
            f"checkpoint holds it. Give what a later step needs to run.steps(state=...), which saves and restores it",
            local,
        )


def _some(read: Mapping[str, str]) -> str:
    return some([f"{name} (by {line})" for name, line in read.items()])
