"""The folder of the prepared data is empty when `prepare` begins, so that its manifest lists what `prepare` wrote."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..address import hashing, manifest
from ..address.hashing import printable
from ..base.text import some
from ..core.errors import UserError


@contextmanager
def prepared_anew(folder: Path) -> Iterator[None]:
    """Have whoever prepares data inside find an empty folder. After a failure, the folder is as it was.

    Whoever writes the files (Python, a library in C, another process), they are then all that lies there.

    Raises:
        UserError: the folder holds files that no preparation wrote, or cannot be set aside; or nothing was written in
            place of what lay there.
    """
    place = folder.resolve()  # a link to a folder on another disk stays one
    before = place.with_name(f".{place.name}.before")
    if before.is_dir() and not (place / manifest.NAME).is_file():
        _restore(place, before)  # a preparation was killed
    shutil.rmtree(before, ignore_errors=True)
    if not place.is_dir():
        yield
        return
    listed = _listed(folder)
    if strange := sorted(_files(place) - listed if listed is not None else ()):
        named = some([printable(name) for name in strange])
        raise UserError(
            f"{folder}: {named} seen, which no preparation wrote (as {manifest.NAME} "
            f"says), and this folder is emptied: move them elsewhere, or remove them, and prepare again"
        )
    _set_aside(place, before)
    try:
        yield
        if (lost := _files(before)) and not _files(place):
            raise UserError(
                f"{folder}: prepare.py wrote nothing but {manifest.NAME}, and {len(lost)} older files lie there: "
                f"remove them, if they may go, and prepare again"
            )
    except BaseException:
        _restore(place, before)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return found - {manifest.NAME}


def _listed(folder: Path) -> set[str] | None:
    """The files that a preparation wrote, as its manifest says; None where it is damaged and nobody remembers them."""
    if not (folder / manifest.NAME).is_file():
        return set()
    try:
        listed = {entry["path"] for entry in manifest.read(folder)["files"]}
    except UserError:
        listed = {manifest.ALL}
    return set(hashing.recall(folder)) or None if manifest.ALL in listed else listed


def _set_aside(place: Path, before: Path) -> None:
    mode = place.stat().st_mode
    try:
        place.rename(before)
        place.mkdir()
        place.chmod(mode)
    except OSError as error:  # a disk is mounted there, for example
        raise UserError(f"{place}: cannot be set aside ({error.strerror}): empty it, and prepare again") from None


def _restore(place: Path, before: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    before.rename(place)
