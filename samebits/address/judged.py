"""How far a project can verify what a receipt says of the library, in sentences."""

from typing import Any

from ..base.project import Project
from ..base.text import some
from .address import LIST, digest
from .release import LibraryState, library, released


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
