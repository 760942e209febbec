"""Whether a project's library, analysis included, and its core are as the template released them.

`library.sha256` in the library's folder lists its files as sha256sum(1) does: `sha256sum --check` reads it, run in
that folder. Who edits code and list alike is found by those who have the list from elsewhere: their own project.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.project import Project
from ..base.text import some
from . import address
from .address import RELEASED, digest
from .manifest import sha256_file

LIST = Path(RELEASED).name


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
    there, wanted = files(project.library), released(project)
    modified = sorted(name for name in there | wanted if there.get(name) != wanted.get(name)) if wanted else [LIST]
    return LibraryState(template_version(project), digest(there), tuple(modified), core_digest(there))


def core_digest(files: Mapping[str, str]) -> str:
    """The digest of core, as the content address has it, from those of the library's files."""
    return digest(address.core({address.FOLDER + name: sha256 for name, sha256 in files.items()}))


def files(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of the library in `folder`, by its name."""
    return {name: sha256_file(folder / name) for name in address.files(folder) if name != LIST}


def released(project: Project) -> dict[str, str]:
    """What `files` returned when the template was released; empty where the list is lost."""
    path = project.library / LIST
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    # a line that is no digest and name makes the list differ from itself
    return {name or LIST: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}


def template_version(project: Project) -> str:
    """The version of the template that wrote the project, from its pyproject.toml."""
    try:
        return str(tomllib.loads((project.root / "pyproject.toml").read_text())["tool"]["repro"]["template"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unknown"


def judged(project: Project, stated: Any) -> list[str]:
    """Sentences on the library that a receipt states, and on that of `project`, which judges it."""
    here = library(project)
    sentences = [_judged(here, digest(released(project)), stated), *_core(here, stated)]
    if here.modified:
        sentences.append(f"this project judges with modified library: {some(here.modified)}")
    return sentences


def _core(here: LibraryState, stated: Any) -> list[str]:
    """A sentence on the core that a receipt states; none where it states none, as receipts of older releases do."""
    try:
        seen, modified = str(stated["core"]["digest"]), [*map(str, stated["core"]["modified"])]
    except (KeyError, TypeError):
        return []
    if not all(text.isprintable() for text in (seen, *modified)):  # which could pass for lines of ours
        return ["core: the receipt states something unreadable of it"]
    kind = f"with modified files: {some(modified)}" if modified else "as released"
    same = "the same as this project's" if seen == here.core else f"another than this project's ({here.core[:16]})"
    return [f"core {seen[:16]}, {kind}, says the receipt; {same}"]


def _judged(here: LibraryState, as_released: str, stated: Any) -> str:
    """How far the list of this project (of digest `as_released`) can verify what a receipt says of the library."""
    try:
        version, seen, modified = str(stated["template"]), str(stated["digest"]), [*map(str, stated["modified"])]
    except (KeyError, TypeError):
        return "library: the receipt states nothing of it"
    if not all(text.isprintable() for text in (version, seen, *modified)):  # which could pass for lines of ours
        return "library: the receipt states something unreadable of it"
    if modified:
        return f"library of template {version} ({seen[:16]}) with modified files: {some(modified)}"
    said = f"library as released by template {version} ({seen[:16]})"
    if version != here.template:
        return f"{said}, says the receipt; this project is of template {here.template} and cannot check it"
    if LIST in here.modified:
        return f"{said}, says the receipt; {LIST} is lost or damaged here, so that it cannot be checked"
    if seen != as_released:
        return (
            f"library {seen[:16]} is not as released by template {version} ({as_released[:16]}), though the receipt "
            f"names no modified file"
        )
    return said
