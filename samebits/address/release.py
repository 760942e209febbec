"""Whether a project's library, analysis included, and its core are as the template released them.

`library.sha256` in the library's folder lists its files as sha256sum(1) does: `sha256sum --check` reads it, run in
that folder. Who edits code and list alike is found by those who have the list from elsewhere: their own project.
"""

from collections.abc import Mapping
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
        core: SHA-256 (hex) of its core, as the content address has it.
    """

    template: str
    digest: str
    modified: tuple[str, ...]
    core: str

    def stated(self) -> dict[str, Any]:
        """What a receipt states of it, JSON-compatible."""
        inside = [name for name in self.modified if address.in_core(name) or name == LIST]
        core = {"digest": self.core, "modified": inside}
        return {"template": self.template, "digest": self.digest, "modified": list(self.modified), "core": core}


def library(project: Project) -> LibraryState:
    """The library of `project`, compared with the list that was released with it."""
    return library_in(project.library, project.template)


def library_in(folder: Path, template: str) -> LibraryState:
    """The library in a folder, which this version of the template brought."""
    there, wanted = files(folder), _listed(folder)
    modified = sorted(name for name in there | wanted if there.get(name) != wanted.get(name)) if wanted else [LIST]
    return LibraryState(template, digest(there), tuple(modified), core_digest(there))


def core_digest(files: Mapping[str, str]) -> str:
    """The digest of core, as the content address has it, from those of the library's files."""
    return digest(address.core({address.FOLDER + name: sha256 for name, sha256 in files.items()}))


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
