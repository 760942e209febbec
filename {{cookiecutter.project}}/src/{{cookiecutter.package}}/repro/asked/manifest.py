"""A data manifest: path, size and SHA-256 of every file, written once and checked before use."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import Refused

NAME = "manifest.json"


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


def write(folder: Path) -> dict[str, Any]:
    """Write the manifest of every file under `folder` into it, and return it."""
    files = [
        {
            "path": path.relative_to(folder).as_posix(),
            "size": path.stat().st_size,
            "sha256": sha256_file(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / NAME
    ]
    manifest = {"files": files}
    (folder / NAME).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, not yet checked against its files."""
    try:
        return json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        raise Refused(f"{folder / NAME}: missing. Prepare the data first: make repro") from None
    except ValueError:
        raise Refused(f"{folder / NAME}: not JSON: truncated or altered. Prepare the data again: make repro") from None


def require_whole(folder: Path, remedy: str = "Prepare the data again: make repro") -> dict[str, Any]:
    """The manifest of `folder`, after checking that every file in it is whole."""
    manifest = read(folder)
    for entry in manifest["files"]:
        require(folder / entry["path"], entry["sha256"], remedy)
    return manifest
