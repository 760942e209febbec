"""Files written durably, and read with care: a reader meets what was written, or a line that says what is wrong.

No other module gives a file its name after writing it, or has the kernel put anything on the disk.
"""

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from .forms import fault, unreadable

PART = ".part"  # ends the name of what is still being written
REMEDY = "It was truncated or altered: restore it, or begin anew in another folder with --out"


def part(path: Path, writer: str = "") -> Path:
    """Where a file or folder is written before it has its name; `writer` tells apart those who write at one time."""
    return path.with_name(f"{path.name}{writer}{PART}")


@contextmanager
def durable(path: Path, writer: str = "") -> Iterator[Path]:
    """Write a file inside at the place that this gives; it has its name afterwards, or is gone after an exception.

    A reader sees the old file or the new one, never half of one.
    """
    beside = part(path, writer)
    try:
        yield beside
        rename(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON-compatible value durably."""
    with durable(path) as beside:
        beside.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def exact(value: Any) -> Any:
    """A value as JSON holds it, which has no infinity and no NaN: these are words."""
    if isinstance(value, Mapping):
        return {key: exact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [exact(each) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def rename(beside: Path, path: Path) -> None:
    """Give a file or folder its name once it is on the disk, so that a power failure leaves nothing half written."""
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders: by one call, so that a kill leaves both complete, where the file system can."""
    for folder in (one, other):
        sync(folder)
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    if ctypes.CDLL(None).renameat2(here, os.fsencode(one), here, os.fsencode(other), swap):
        aside = part(one, "-swapped")
        other.rename(aside)
        one.rename(other)
        aside.rename(one)
    for folder in (one, other):
        sync(folder.parent)


def read_json(path: Path, form: Any = object, remedy: str = REMEDY) -> Any:
    """What `write_json` wrote.

    Raises:
        UserError: the file is missing, no JSON, or not of the `form`, a type.
    """
    return parse_json(read_text(path, remedy), str(path), form, remedy)


def parse_json(text: str, place: str, form: Any = object, remedy: str = REMEDY) -> Any:
    """The value in a text that was read at `place`.

    Raises:
        UserError: as `read_json`.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{place}: not JSON: {error}. {remedy}") from None
    except RecursionError:
        raise UserError(f"{place}: not JSON that can be read: it is nested too deep. {remedy}") from None
    require(value, place, form, remedy)
    return value


def require(value: Any, place: str, form: Any, remedy: str) -> None:
    """Refuse a parsed value that cannot be worked with, or is not of the `form`."""
    if wrong := unreadable(value) or fault(value, form):
        raise UserError(f"{place}: {wrong}. {remedy}".rstrip())


def read_text(path: Path, remedy: str = REMEDY) -> str:
    """The text in a file.

    Raises:
        UserError: it is missing, or not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: missing. {remedy}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text in UTF-8: {error}. {remedy}") from None


def free(path: Path) -> Path:
    """The path; where something is there, the first of path-2, path-3 … at which nothing is."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not os.path.lexists(each))


def sync(path: Path | int) -> None:
    """Have the kernel put a file's bytes, or a folder's entries, on the disk; a file may be an open descriptor."""
    if isinstance(path, int):
        return os.fsync(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
