"""Rows of digests in a file, each with a hash over all rows before it, so that two files are compared by bisection.

The trace writes two such files: a row for each sum of gradients (`STEP`), and such a row with a digest of each tensor.
A step makes one sum, or several where its loop iterates over it once more.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..base.files import sync
from ..core.errors import UserError
from .contradiction import contradiction

LINK = 24  # bytes of a row's hash
HAS_WEIGHTS = 1  # a flag: the row, which is the last one of its step, holds a digest of the weights
SUM = 8  # the bit of the flags from which the number of the sum in its step begins
STEP = np.dtype(
    [("step", "<u4"), ("flags", "<u4"), ("batch", "<u8"), ("loss", "<u8"), ("gradient", "<u8"), ("weights", "<u8")]
)
WORDS = "sums of gradients", "batch", "loss", "gradient", "weights"  # of 8 bytes, in a row of `STEP`


def rows_of(path: Path, steps: int, first: int = 0) -> int:
    """How many rows the first steps, which begin with `first`, have in a chain of `STEP`.

    Raises:
        UserError: some are not there.
    """
    rows = np.fromfile(path, np.dtype([("row", STEP), ("link", f"V{LINK}")])) if path.is_file() else None
    numbers = rows["row"]["step"] if rows is not None else np.empty(0, np.uint32)
    here = numbers[numbers < steps]
    seen = int(here.max()) + 1 if len(here) else first
    if seen < steps:
        raise UserError(
            f"{path}: {seen} steps seen, {steps} wanted, to go on with: the trace was off before, or rows are lost. "
            f"Begin the run anew in another folder with --out"
        )
    return len(here)


class Chain:
    """A file of rows, each `width` bytes followed by 24 bytes of SHA-256 over the hash before it and those bytes.

    Two chains that are equal in one row are equal in all before it, so the first difference is found by
    bisection. Opened at a position, rows that are there already must come again as they are.
    """

    def __init__(
        self, path: Path, width: int, position: int = 0, words: Sequence[str] = (), anew: bool = False
    ) -> None:
        """`words` names what each 8 bytes of a row are. Rows that would come again are removed to begin `anew`."""
        self.path, self.width, self.position, self._words = path, width, position, words
        path.touch()
        whole = path.stat().st_size // (width + LINK)
        os.truncate(path, whole * (width + LINK))  # a row torn by a crash
        if position > whole:
            raise UserError(
                f"{path}: {whole} steps seen, {position} wanted, to go on with: the trace was off before, or rows "
                f"are lost. Begin the run anew in another folder with --out"
            )
        if anew:
            os.truncate(path, position * (width + LINK))
        self._there = position if anew else whole
        self._file = path.open("r+b", buffering=0)
        self._link = self._linked(position)

    def _linked(self, position: int) -> bytes:
        """The hash after so many rows, each of which is checked.

        Raises:
            UserError: a row is not what was written.
        """
        link = bytes(LINK)
        for number in range(position):
            row = self._file.read(self.width + LINK)
            link = hashlib.sha256(link + row[: self.width]).digest()[:LINK]
            if row[self.width :] != link:
                raise UserError(
                    f"{self.path}: row {number} is not what was written: the trace is damaged. Begin the run anew in "
                    f"another folder with --out"
                )
        return link

    @property
    def root(self) -> str:
        """The hash (hex) of all rows so far."""
        return self._link.hex()

    @property
    def repeats(self) -> bool:
        """Whether the next row is there already."""
        return self.position < self._there

    def append(self, row: bytes, step: int) -> None:
        """Add a row of a step, or find it there already.

        Raises:
            RunError: another row is there.
        """
        self._link = hashlib.sha256(self._link + row).digest()[:LINK]
        if self.repeats:
            there = self._file.read(self.width + LINK)
            if there != row + self._link:
                raise contradiction(step, self._differing(there, row))
        else:
            self._file.write(row + self._link)
        self.position += 1

    def _differing(self, there: bytes, row: bytes) -> str:
        """The name of the first word in which two rows differ."""
        places = (slice(8 * place, 8 * place + 8) for place in range(len(self._words)))
        named = zip(self._words, places, strict=True)
        return next((name for name, place in named if there[place] != row[place]), f"row in {self.path}")

    def sync(self) -> None:
        """Return once all rows are on the disk."""
        sync(self._file.fileno())
