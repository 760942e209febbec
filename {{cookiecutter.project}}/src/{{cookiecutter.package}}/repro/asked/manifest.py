"""A manifest: path, size and SHA-256 of every file in a folder, written once and checked before use.

That of prepared data also states the keys that they were prepared with.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..differences import differences, named, some
from ..errors import Refused
from ..files import read_json
from .settings import Data, addressed

NAME = "manifest.json"
REMEDY = "Prepare the data again: make repro"
SHAPE = {"asked?": dict, "files": [{"path": str, "size": int, "sha256": str}]}


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require(path: Path, sha256: str, remedy: str) -> None:
    """Refuse a file that is missing or whose SHA-256 is not the one wanted."""
    if not path.is_file():
        raise Refused(f"{path}: missing; wanted SHA-256 {sha256}. {remedy}".rstrip())
    seen = sha256_file(path)
    if seen != sha256:
        raise Refused(
            f"{path}: SHA-256 {seen} ({path.stat().st_size} bytes) seen, {sha256} wanted: "
            f"it is truncated or altered. {remedy}".rstrip()
        )


def require_raw(raw: Path, sha256: str) -> None:
    """Refuse a dataset file that is not the one params.yaml names.

    The remedy begins with git, because `dvc repro` writes the digest of any file that it finds into the pointer.
    """
    pointer = f"{raw}.dvc"
    require(raw, sha256, f"Restore it: git checkout {pointer} && dvc checkout --force {pointer} (or dvc pull)")


def write(folder: Path, asked: Data | None = None) -> dict[str, Any]:
    """Write the manifest of every file under `folder` into it, and return it.

    `asked` is what `prepare` was given, where the files are prepared data.

    Raises:
        Refused: a folder in it is a link.
    """
    files = [
        {"path": name, "size": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        for name in _names(folder)
    ]
    manifest = {"files": files} if asked is None else {"asked": addressed(asked), "files": files}
    (folder / NAME).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, not yet checked against its files."""
    if not (folder / NAME).is_file():
        raise Refused(f"{folder / NAME}: missing. Prepare the data first: make repro")
    return read_json(folder / NAME, SHAPE, f"It was truncated or altered. {REMEDY}")


def require_whole(folder: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """The manifest of `folder`, after checking that every file in it is whole, and that there is no other one."""
    manifest = read(folder)
    for entry in manifest["files"]:
        require(folder / entry["path"], entry["sha256"], remedy)
    if unlisted := sorted({*_names(folder)} - {entry["path"] for entry in manifest["files"]}):
        raise Refused(f"{folder}: {some(unlisted)} seen, but not in {NAME}: added later. {remedy}".rstrip())
    return manifest


def require_prepared(data: Data) -> dict[str, Any]:
    """The manifest of the prepared data, after checking that they are whole and prepared as `data` asks."""
    folder = Path(data.prepared)
    manifest = require_whole(folder)
    if "asked" not in manifest:
        raise Refused(
            f"{folder / NAME}: does not say which keys the data were prepared with. End prepare.py with "
            f"manifest.write(folder, asked=config), and prepare them again: make repro"
        )
    if differing := differences(manifest["asked"], addressed(data)):
        raise Refused(
            f"{folder}: prepared with other keys of `data` ({named(differing, 'there', 'here')}). Prepare the data "
            f"again: make repro. If you give such a key with --set, give prepare the same --set"
        )
    return manifest


def _names(folder: Path) -> list[str]:
    """The files under `folder` but its manifest, by their names from there, sorted.

    Raises:
        Refused: a folder in it is a link, behind which other files may lie tomorrow.
    """
    found = []
    for at, folders, names in os.walk(folder):
        for name in folders:
            if Path(at, name).is_symlink():
                raise Refused(f"{Path(at, name)}: a link to a folder seen, files wanted: copy them there")
        found += [Path(at, name).relative_to(folder).as_posix() for name in names]
    return sorted(name for name in found if name != NAME)
