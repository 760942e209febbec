"""The code that runs is the code that is hashed: unchanged since the start, and not stale."""

import marshal
import sys
from collections.abc import Iterator
from pathlib import Path

from ..differences import some
from ..errors import Refused
from ..project import Project
from .address import code

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


def _bytecode(project: Project) -> Iterator[tuple[Path, Path]]:
    """Sources of loaded modules of the project, and their bytecode where it is older than their last change.

    A date can be set back, as by `cp -p` or `git` tools that keep it; the time of the inode's change cannot.
    """
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})  # asked for an attribute, a lazy module would load what it stands for
        file, cache = held.get("__file__"), held.get("__cached__")
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
