"""Reading of chains: their rows, the hash of all rows, and the first row in which two differ. No run needs this."""

import hashlib
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np

from .chain import LINK


def rows(path: Path, fields: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The complete rows of a chain, memory-mapped: `fields` and their `link`."""
    row = np.dtype([*((name, fields[name]) for name in fields.names or ()), ("link", f"V{LINK}")])
    count = path.stat().st_size // row.itemsize
    return np.memmap(path, row, "r", shape=(count,)) if count else np.empty(0, row)


def root(path: Path, width: int) -> str | None:
    """The hash (hex) of all rows of a chain, computed anew; None where a row and its hash do not agree."""
    content, link = path.read_bytes(), bytes(LINK)
    for start in range(0, len(content), width + LINK):
        row, there = content[start : start + width], content[start + width : start + width + LINK]
        link = hashlib.sha256(link + row).digest()[:LINK]
        if there != link:
            return None
    return link.hex()


def first_difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int | None:
    """The first row in which two chains differ, by bisection over the links; None if the shorter begins the longer."""
    both = range(min(len(one), len(other)))
    first = bisect_left(both, True, key=lambda row: bool(one["link"][row] != other["link"][row]))
    return first if first < len(both) else None
