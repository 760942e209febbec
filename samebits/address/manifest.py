"""A manifest: path, size and SHA-256 of every file in a folder, written once and checked before use.

That of prepared data also states the keys that they were prepared with. Of a raw folder, and of a prepared one of many
files, one SHA-256 is stated: that of its listing, the lines that `sha256sum` prints of its files, sorted by name.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import project
from ..base.files import read_json
from ..base.forms import ABSENT, Form
from ..base.text import differences, named, some
from ..config.settings import Check, Data, addressed
from ..core.errors import UserError
from . import hashing
from .hashing import WHOLE, Entries, printable

NAME = "manifest.json"
REMEDY = "Prepare the data again: make repro"
FEW = 1000  # files that a manifest states one by one
ALL = "."  # the path that stands for all files of a folder
ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


class File(Form):
    """A file that is stated."""

    path: str
    size: int
    sha256: str


class Manifest(Form):
    """What manifest.json holds."""

    requested: dict[str, Any] = ABSENT
    files: list[File]
    raw: bool = ABSENT


class Unprepared(UserError):
    """The data have never been prepared, or for other keys; what prepares them mends it."""


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing(held: Entries) -> bytes:
    """What coreutils' `sha256sum` prints of files, sorted by the bytes of their names."""
    lines = []
    for name in sorted(held, key=os.fsencode):
        odd = "\\" in name or "\n" in name or "\r" in name
        lines.append(f"{chr(92) * odd}{held[name].sha256}  {name.translate(ESCAPED) if odd else name}\n")
    return os.fsencode("".join(lines))


def digest(held: Entries) -> str | None:
    """The SHA-256 of a file, or of the listing of a folder; None where no file is."""
    if WHOLE in held:
        return held[WHOLE].sha256
    return hashlib.sha256(listing(held)).hexdigest() if held else None


def read_raw(data: Data) -> Entries:
    """Every file of the dataset, by its name from the folder; a dataset of one file has the name "".

    Raises:
        UserError: it is missing or empty; or it is, or holds, a link to a folder.
    """
    raw, why = _raw(data)
    before, held = _look(raw, data.check)
    if not held:
        raise UserError(f"{raw}: an empty folder. Put the dataset there" if raw.is_dir() else f"{raw}: missing. {why}")
    _keep(raw, before, held)
    return held


def require_raw(data: Data) -> None:
    """Refuse a dataset, a file or a folder, that is not the one params.yaml names; DVC brings one that is missing.

    The remedy begins with git, because `dvc repro` writes the digest of any file that it finds into the pointer.
    """
    raw, why = _raw(data)
    remedy = f"Restore it: git checkout {raw}.dvc && dvc checkout --force {raw}.dvc (or dvc pull)"
    require_sha256(raw, data.sha256, why or remedy, data.check)


def _raw(data: Data) -> tuple[Path, str]:
    """The dataset, and why DVC could not bring it where it is missing."""
    raw = Path(data.raw)
    if raw.is_symlink() and raw.is_dir():
        raise UserError(f"{raw}: a link to a folder seen, a folder wanted: name that one as data.raw: {raw.resolve()}")
    if raw.exists():
        return raw, ""
    from .pull import bring

    return raw, bring(raw, project.root())


def require_sha256(
    root: Path, sha256: str, remedy: str, check: Check | None = "every_byte", but: str | None = None
) -> None:
    """Refuse a file that is missing or whose SHA-256 is not the one wanted; or a folder, whose listing's it is.

    Without `check`, each byte is read, and nothing remembered.

    What is at fault in a folder, `but` for one file that does not count, is named if its files are remembered as they
    should be.
    """
    before, held = _look(root, check, but)
    if digest(held) == sha256:
        return _keep(root, before, held) if check else None
    if root.exists() and digest(before) == sha256 and (WHOLE in before) == (WHOLE in held):
        wanted = {name: entry.sha256 for name, entry in before.items()}
        said = _faults(root, wanted, held, f"among the files of SHA-256 {sha256}")
        # these stay in memory as they should be, but one that is not is trusted no more
        held = {name: old if held.get(name) == old else hashing.distrusted(old) for name, old in before.items()}
    elif root.is_dir():
        size = sum(entry.size for entry in held.values())
        seen = f"SHA-256 {digest(held)} of the listing of {len(held)} files ({size} bytes) seen" if held else "empty"
        said = f"{root}: {seen}, {sha256} wanted: files are missing, altered or added, and no memory says which"
    else:
        said = _faults(root, {WHOLE: sha256}, held)
    if check:
        _keep(root, before, held)
    raise UserError(f"{said}. {remedy}".rstrip())


def _look(root: Path, check: Check | None, but: str | None = None) -> tuple[Entries, Entries]:
    """What is remembered of a file or folder, and what it holds; without `check`, each byte is read and none kept."""
    before = hashing.recall(root) if check else {}
    return before, hashing.entries(root, {"remembered": before, "every_byte": {}, None: None}[check], but)


def _keep(root: Path, before: Entries, held: Entries) -> None:
    if held != before:
        hashing.remember(root, held)


def _faults(root: Path, wanted: Mapping[str, str], held: Entries, place: str = "") -> str:
    """In what the files differ from those that are wanted, by their SHA-256; nothing where they do not."""
    said = []
    if missing := sorted(wanted.keys() - held.keys()):
        said.append(f"{_path(root, missing)}: missing; wanted SHA-256 {wanted[missing[0]]}{_likewise(missing)}")
    if altered := sorted(name for name in wanted.keys() & held.keys() if held[name].sha256 != wanted[name]):
        seen = held[altered[0]]
        said.append(
            f"{_path(root, altered)}: SHA-256 {seen.sha256} ({seen.size} bytes) seen, {wanted[altered[0]]} wanted: "
            f"it is truncated or altered{_likewise(altered)}"
        )
    if added := sorted(held.keys() - wanted.keys()):
        said.append(f"{root}: {some([printable(name) for name in added])} seen, but not {place}: added later")
    return ". ".join(said)


def _path(root: Path, names: Sequence[str]) -> str:
    return printable(str(root / names[0]))


def _likewise(names: Sequence[str]) -> str:
    return f"; likewise {some([printable(name) for name in names[1:]])}" if names[1:] else ""


def write(folder: Path, requested: Data | None = None, raw: bool = False) -> dict[str, Any]:
    """Write the manifest of every file under `folder`, which is made if need be, into it, and return it.

    `requested` is what `prepare` was given, where the files are prepared data. `raw` says that a run reads the dataset
    itself, too, or nothing else: then it is checked before each run, and the code may open it.

    Raises:
        UserError: a folder in it is a link, or a name is not in UTF-8.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before, held = _look(folder, "every_byte" if requested else None, but=NAME)
    if odd := [printable(name) for name in sorted(held) if any("\ud800" <= mark <= "\udfff" for mark in name)]:
        raise UserError(f"{folder}: {some(odd)}: names in UTF-8 wanted; have prepare.py choose others")
    if requested:
        _keep(folder, before, held)
    manifest: dict[str, Any] = {"requested": addressed(requested)} if requested else {}
    manifest |= {"files": _stated(held)}
    manifest |= {"raw": True} if raw else {}
    (folder / NAME).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def stated(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Files of one folder as its manifest states them; each byte is read."""
    return [{"path": path.name, "size": path.stat().st_size, "sha256": sha256_file(path)} for path in paths]


def _stated(held: Entries) -> list[dict[str, Any]]:
    """Files as a manifest states them: one by one where they are few, else all at once."""
    if len(held) > FEW:
        return [{"path": ALL, "size": sum(entry.size for entry in held.values()), "sha256": digest(held)}]
    return [{"path": name, "size": held[name].size, "sha256": held[name].sha256} for name in sorted(held)]


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, not yet checked against its files."""
    if not (folder / NAME).is_file():
        raise Unprepared(f"{folder / NAME}: missing. Prepare the data first: make repro")
    return read_json(folder / NAME, Manifest, f"It was truncated or altered. {REMEDY}")


def require_complete(folder: Path, remedy: str = REMEDY, check: Check | None = None) -> dict[str, Any]:
    """The manifest of `folder`, after checking that every file in it is whole, and that there is no other one.

    Without `check`, each byte is read, and nothing remembered.
    """
    manifest = read(folder)
    wanted = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
    if ALL in wanted:
        require_sha256(folder, wanted[ALL], remedy, check or "every_byte", but=NAME)
        return manifest
    before, held = _look(folder, check, but=NAME)
    if check:
        _keep(folder, before, held)
    if faults := _faults(folder, wanted, held, f"in {NAME}"):
        raise UserError(f"{faults}. {remedy}".rstrip())
    return manifest


def require_sound(data: Data) -> dict[str, Any]:
    """The manifest of the prepared data, after checking all that a run reads: these, and the dataset if it does."""
    manifest = require_complete(Path(data.prepared), check=data.check)
    if manifest.get("raw"):
        require_raw(data)
    return manifest


def require_prepared(data: Data) -> dict[str, Any]:
    """As `require_sound`, after checking that the data were prepared as `data` asks."""
    require_sound(data)
    return require_requested(data)


def require_requested(data: Data) -> dict[str, Any]:
    """The manifest of the prepared data, after checking that it says that they were prepared as `data` asks."""
    folder = Path(data.prepared)
    manifest = read(folder)
    if "requested" not in manifest:
        raise UserError(
            f"{folder / NAME}: does not say which keys the data were prepared with. End prepare.py with "
            f"manifest.write(folder, requested=config), and prepare them again: make repro"
        )
    if differing := differences(manifest["requested"], addressed(data)):
        raise Unprepared(
            f"{folder}: prepared with other keys of `data` ({named(differing, 'there', 'here')}). Prepare the data "
            f"again: make repro. If you give such a key with --set, give prepare the same --set"
        )
    return manifest
