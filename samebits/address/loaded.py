"""The code that runs is the code that is hashed: a stage loads its modules from the sources with which it began."""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .. import loader
from ..base.project import LIBRARY, Project
from ..base.text import some
from ..core.errors import RunError, UserError
from .address import FOLDER, code, project_files

_begun: dict[Project, dict[str, str]] = {}
_sources: dict[Project, dict[str, bytes]] = {}
_said: set[str] = set()  # lines, each once


def remember(project: Project) -> None:
    """A stage begins: its code is that of now, before it is imported, also where a module is imported late."""
    names = [name for name in project_files(project) if name.endswith(".py")]
    sources = {name: project.file(name).read_bytes() for name in names}
    loader.pin(project.name, {name: source for name, source in sources.items() if not name.startswith(FOLDER)})
    if _is_own(project):
        ours = {name.removeprefix(FOLDER): source for name, source in sources.items() if name.startswith(FOLDER)}
        loader.pin(loader.NAME, ours)
    begun = code(project)
    _sources[project] = sources
    _begun[project] = begun | {
        name: hashlib.sha256(source).hexdigest() for name, source in sources.items() if name in begun
    }


def copy(project: Project, name: str, path: Path) -> None:
    """Write a file of the code to another place: a Python source as it was when the stage began, any other as it is."""
    if (source := _sources.get(project, {}).get(name)) is None:
        shutil.copyfile(project.file(name), path)
    else:
        path.write_bytes(source)


def require_own_library(project: Project) -> None:
    """Refuse to run with a library that is not the project's own copy, where it has one.

    Raises:
        UserError: another one was found first.
    """
    if not _is_own(project):
        raise UserError(
            f"the library that runs lies in {LIBRARY}, and no hash covers it; this project's lies in "
            f"{project.library}. Put that one first: PYTHONPATH=src:vendor"
        )


def _is_own(project: Project) -> bool:
    return project.library.resolve() == LIBRARY


def begun() -> dict[Project, dict[str, str]]:
    """The digests of the code of each stage that has begun here, by its project."""
    return dict(_begun)


def require_unchanged(project: Project, now: Mapping[str, str] | None = None) -> None:
    """Refuse code, `now` or as it lies there, that is not what was loaded.

    Raises:
        UserError: a file changed since `remember`, or a module since it was loaded.
    """
    now = now or code(project)
    changed = _changed(project, now) | {name for name, sha256 in _loaded(project) if now.get(name, sha256) != sha256}
    if changed:
        raise UserError(
            f"{some(sorted(changed))}: changed while the stage started, so nobody knows what it loaded. Start it again"
        )


def is_unchanged(project: Project) -> bool:
    """Whether the code is still that with which the stage began."""
    return not _changed(project, code(project))


def require_kept(project: Project) -> None:
    """Refuse an outcome whose code, as far as it is no Python source, changed since the stage began.

    Sources were loaded as they were then, so a line says that they have changed.

    Raises:
        UserError: another file changed: the stage may have read either.
    """
    changed = sorted(_changed(project, code(project)))
    if others := [name for name in changed if not name.endswith(".py")]:
        raise UserError(f"{some(others)}: changed while the stage ran, so nobody knows what it read. Start it again")
    line = f"{some(changed)}: changed since the start; this outcome is that of the code as it was then"
    if changed and line not in _said:
        _said.add(line)
        RunError(line).report()


def require_same(begun: Mapping[Project, Mapping[str, str]]) -> None:
    """Refuse modules of this process, a worker's, that are not those which the stage began with.

    Raises:
        UserError: a worker that was started anew has loaded a source that changed meanwhile.
    """
    for project, digests in begun.items():
        if other := sorted({name for name, sha256 in _loaded(project) if digests.get(name, sha256) != sha256}):
            raise UserError(f"{some(other)}: changed before a worker loaded it. Start the stage again")


def _changed(project: Project, now: Mapping[str, str]) -> set[str]:
    before = _begun.get(project, now)
    return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def _loaded(project: Project) -> Iterator[tuple[str, str]]:
    """The loaded modules of the package and the library: the name of each one's file, and the SHA-256 of its source."""
    tops = {"": project.package, FOLDER: project.library.resolve()}

    @cache
    def inside(folder: str) -> list[str]:
        """What names of files in a folder begin with, for each of the two that it lies in."""
        place = Path(os.path.realpath(folder))
        return [
            prefix + "".join(f"{part}/" for part in place.relative_to(top).parts)
            for prefix, top in tops.items()
            if place.is_relative_to(top)
        ]

    for module in list(sys.modules.values()):
        spec = getattr(module, "__dict__", {}).get("__spec__")  # a lazy module would load what it stands for
        source: Any = getattr(spec, "loader", None)
        if sha256 := getattr(source, "sha256", ""):  # what another copy of this package has loaded, has it, too
            folder, _, name = source.path.rpartition("/")
            for prefix in inside(folder):
                yield prefix + name, sha256
