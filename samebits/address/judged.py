"""Sentences on the library that a receipt states, as far as a project can verify it."""

from collections.abc import Mapping
from typing import Any

from ..base.project import Project
from ..base.text import some
from ..core import arithmetic
from .address import LIST, code, core_stated, digest
from .release import LibraryState, library, released


def judged(project: Project, receipt: Mapping[str, Any]) -> list[str]:
    """Return sentences on the library behind a receipt, whose predicate this is, as `project` can verify it."""
    here = library(project)
    sentences = [_judged(here, digest(released(project)), receipt.get("library")), *_core(project, receipt)]
    if here.modified:
        sentences.append(f"this project judges with modified library: {some(here.modified)}")
    return sentences


def _core(project: Project, receipt: Mapping[str, Any]) -> list[str]:
    """Return a sentence on the core that the content address states; none if it states none, as the oldest do."""
    core = receipt["preimage"].get("core")
    if not core:
        return []
    prefix = f"core: {arithmetic.description(core)}"
    if arithmetic.is_edited(core):
        is_same = core == core_stated(project, code(project))
        return [f"{prefix}; {'the same as' if is_same else 'not'} the core of this project"]
    core_digest = arithmetic.digest(receipt.get("core_files", {}))
    released_as = arithmetic.releases(project.library).get(core_digest)
    if released_as is None:
        return [f"{prefix} (files {core_digest[:16]}), says the receipt; this project does not know this release"]
    if released_as != core["arithmetic"]:
        return [f"{prefix}, says the receipt; but its files are released with arithmetic {released_as}: altered"]
    return [f"{prefix}, as released"]


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
