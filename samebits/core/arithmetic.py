"""The version of core's arithmetic, and what a content address states of core.

An address states the integer in the file ARITHMETIC, not the files of core, so a changed comment, message or refactored
function leaves every result valid. `make golden` trains a set of networks and shows whether the arithmetic has changed.
The integer is trusted only for a core as some release left it: `core_releases.txt` beside this package lists the
SHA-256 of each. For an edited core, the address states every file.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "ARITHMETIC"  # a file of its own: DVC depends on it, and no comment stands in it
RELEASES = "core_releases.txt"  # in the library's folder: core's digest cannot cover a list that contains it


def digest(files: Mapping[str, str]) -> str:
    """Return the SHA-256 (hex) of core, from the SHA-256 (hex) of each of its files by path relative to core."""
    lines = (f"{sha256}  {name}\n" for name, sha256 in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def releases(library: Path) -> dict[str, int]:
    """Return the arithmetic of each released core by its digest, as the library in this folder lists them.

    A line that cannot be read is left out, so a damaged list makes core count as edited.
    """
    path = library / RELEASES
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    words = [line.split() for line in lines]
    return {row[0]: int(row[1]) for row in words if len(row) == 2 and row[1].isdecimal()}


def stated(files: Mapping[str, str], released: Mapping[str, int]) -> dict[str, Any]:
    """Return what a content address states of core: its arithmetic if it is as released, else its files."""
    arithmetic = released.get(digest(files))
    return dict(files) if arithmetic is None else {"arithmetic": arithmetic}


def is_edited(core: Mapping[str, Any]) -> bool:
    """Return True if `core`, as `stated` returns it, is as no release left it."""
    return "arithmetic" not in core


def is_earlier(core: Mapping[str, Any]) -> bool:
    """Return True if an address was made by a release whose core had no arithmetic version."""
    return is_edited(core) and FILE not in core


def description(core: Mapping[str, Any]) -> str:
    """Return a few words on `core`, as `stated` returns it, for messages."""
    if not is_edited(core):
        return f"arithmetic {core['arithmetic']}"
    return f"{'earlier release' if is_earlier(core) else 'edited'} {digest(core)[:8]}"
