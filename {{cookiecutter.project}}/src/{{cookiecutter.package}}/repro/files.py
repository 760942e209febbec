"""Files written whole: a reader or a crash never meets half of one."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    rename(beside, path)


def rename(beside: Path, path: Path) -> None:
    """Give a file its name once its bytes are on the disk, so that a power failure leaves no empty file."""
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def read_json(path: Path) -> Any:
    """What `write_json` wrote."""
    return json.loads(path.read_text())


def sync(path: Path) -> None:
    """Have the kernel put a file's bytes, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
