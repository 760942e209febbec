"""The code that runs is the code that is hashed: unchanged since the start, not stale, and from no other place."""

import marshal
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from ..differences import some
from ..errors import Refused
from ..project import Project
from .address import code

INSTALLED = {"site-packages", "dist-packages"}  # names of folders
HEADER = 16  # bytes of a .pyc before its code object

_begun: dict[Path, dict[str, str]] = {}


def remember(project: Project) -> None:
    """A stage begins: its code is that of now, before it is imported."""
    _begun[project.package] = code(project)


def require_unchanged(project: Project) -> None:
    """Refuse code that is not what was imported.

    Raises:
        Refused: a file changed since `remember`, or Python ran bytecode that is not its source's.
    """
    before, now = _begun.get(project.package, {}), code(project)
    changed = sorted(name for name in before.keys() | now.keys() if before and before.get(name) != now.get(name))
    if changed:
        raise Refused(
            f"{some(changed)}: changed while the stage started, so nobody knows what it loaded. Start it again"
        )
    for source, cached in _bytecode(project):
        if not _is_of(cached, source):
            raise Refused(
                f"{source}: Python ran {cached}, the bytecode of an older version: the file's date hides that it "
                f"changed. Remove the bytecode and start again: rm {cached}"
            )


def require_installed(project: Project, unhashed: Sequence[str]) -> None:
    """Refuse modules that are neither the project's, nor Python's, nor installed in its environment.

    A module without a file of its own there passes where its top-level package has one, which made it.

    Raises:
        Refused: one comes from elsewhere, as by PYTHONPATH, and `unhashed` holds neither its name nor "all".
    """
    ours = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "scripts")]
    ours.append(project.root.resolve())
    python = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]

    @cache
    def known(folder: Path) -> bool:
        folder = folder.resolve()  # of a file that is a link the name counts: Debian's own are links
        if any(folder.is_relative_to(place) for place in ours):
            return True
        inside = [folder.relative_to(place).parts for place in python if folder.is_relative_to(place)]
        return any(not INSTALLED & set(parts) for parts in inside)

    files = {
        name: Path(file) for name, module in list(sys.modules.items()) if (file := getattr(module, "__file__", None))
    }
    strange = {name for name, file in files.items() if not known(file.parent)}
    tops = {name: name.partition(".")[0] for name in sorted(strange)}
    found = [name for name, top in tops.items() if top not in unhashed and (top in strange or top not in files)]
    if found and "all" not in unhashed:
        raise Refused(
            f"{some([f'{name} ({files[name]})' for name in found])}: loaded from outside the project and its "
            f"environment, so no hash covers it. Move it into the package, add it to requirements, or name it in "
            f"unhashed.modules"
        )


def _bytecode(project: Project) -> Iterator[tuple[Path, Path]]:
    """Sources of loaded modules of the project, and their bytecode where it is older than their last change.

    A date can be set back, as by `cp -p` or `git` tools that keep it; the time of the inode's change cannot.
    """
    for module in list(sys.modules.values()):
        file, cache = getattr(module, "__file__", None), getattr(module, "__cached__", None)
        if not (file and cache and Path(file).is_relative_to(project.package)):
            continue
        source, cached = Path(file), Path(cache)
        if source.is_file() and cached.is_file() and source.stat().st_ctime >= cached.stat().st_mtime:
            yield source, cached


def _is_of(cached: Path, source: Path) -> bool:
    try:
        there = marshal.loads(cached.read_bytes()[HEADER:])
    except (ValueError, EOFError, TypeError):
        return True  # Python could not load it either
    return there == compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
