"""Removal of what a run wrote, by the names that runs give. What others have put into its folders stays there."""

import re
from pathlib import Path

from ..base.files import free

CUT_SHORT = r"\.tmp\w+"  # what a kill leaves of a file that safetensors was writing
VALUES = "state.json"  # of a checkpoint: all that is no tensor
CHECKPOINT = re.compile(r"(\d{9})-([0-9a-f]{16})")  # complete
SAVED = re.compile(r"(damaged-)?\d{9}-[0-9a-f]{16}|\.\d{9}\.part")  # checkpoints
STATE = re.compile(rf"(model|optimizer|others)(-\d+)?\.safetensors|(state|manifest)\.json(\.part)?|{CUT_SHORT}")


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; files of others that lie in it stay in `left-NAME`, for a run may use its name again."""
    for file in own(folder, STATE):
        file.unlink()
    if not remove_empty(folder):
        folder.rename(free(folder.with_name(f"left-{folder.name}")))


def own(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """What lies in a folder under names that a run gives; nothing where there is no folder."""
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)] if folder.is_dir() else []


def remove_empty(folder: Path) -> bool:
    """Remove a folder in which nothing lies. Returns whether it is gone."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return not folder.exists()
