"""Comparison of a project's library, analysis included, with the list that was released with it.

`library.sha256` in the library's folder lists its files as sha256sum(1) does: `sha256sum --check` reads it, run in
that folder. An edit of both code and list is found by a project that has the list from elsewhere.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.project import Project
from . import address
from .address import LIST, digest
from .manifest import sha256_file


@dataclass(frozen=True)
class LibraryState:
    """The library of a project as it stands.

    Attributes:
        template: the version of the template that wrote the project.
        digest: SHA-256 (hex) over the names and digests of all its files.
        modified: the files that were changed, added or removed since the release, by name; the list itself, where
            that is lost.
    """

    template: str
    digest: str
    modified: tuple[str, ...]

    def stated(self) -> dict[str, Any]:
        """Return what a receipt states of it, JSON-compatible."""
        return {"template": self.template, "digest": self.digest, "modified": list(self.modified)}


def library(project: Project) -> LibraryState:
    """The library of `project`, compared with the list that was released with it."""
    return library_in(project.library, project.template)


def library_in(folder: Path, template: str) -> LibraryState:
    """The library in a folder, which this version of the template brought."""
    there, wanted = files(folder), _listed(folder)
    modified = sorted(name for name in there | wanted if there.get(name) != wanted.get(name)) if wanted else [LIST]
    return LibraryState(template, digest(there), tuple(modified))


def files(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of the library in `folder`, by its name."""
    return {name: sha256_file(folder / name) for name in address.files(folder) if name != LIST}


def released(project: Project) -> dict[str, str]:
    """What `files` returned when the template was released; empty where the list is lost."""
    return _listed(project.library)


def _listed(folder: Path) -> dict[str, str]:
    path = folder / LIST
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    # a line that is no digest and name makes the list differ from itself
    return {name or LIST: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
