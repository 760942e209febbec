"""Removal of what a run wrote, by the names that runs give. What others have put into its folders stays there."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EEXIST, ENOTEMPTY
from pathlib import Path

from ..base.files import free
from . import names

CUT_SHORT = r"\.tmp\w+"  # what a kill leaves of a file that safetensors was writing
TRACED = re.compile(rf"(steps|tensors)\.bin|tensors\.json(\.part)?|values\.safetensors|rank\d+\.jsonl|{CUT_SHORT}")
SAVED = re.compile(r"(damaged-)?\d{9}-[0-9a-f]{16}|\.\d{9}\.part")  # checkpoints
STATE = re.compile(rf"(model|optimizer|others)(-\d+)?\.safetensors|(state|manifest)\.json(\.part)?|{CUT_SHORT}")


def traced(out: Path) -> list[Path]:
    """The files of the trace in the run directory `out`."""
    return list(_own(out / names.TRACE, TRACED))


def drop_replaced(out: Path, report: Callable[[str], None]) -> None:
    """Remove the finished runs in whose place the one in `out` has come, now that it has finished, too."""
    earlier = out / names.EARLIER
    try:
        for replaced in earlier.glob(f"{names.REPLACED}*"):
            remove_run(replaced)
        if earlier.is_dir() and not any(earlier.iterdir()):
            earlier.rmdir()
    except OSError as error:
        report(f"{earlier}: a replaced run is not removable ({error.strerror}: {error.filename}): remove it by hand")


def remove_run(out: Path) -> None:
    """Remove the files of the run in `out`, and the folder where nobody else has put any there."""
    for name in sorted(names.FILES, key=lambda name: name != names.RUN):  # that first: without it, there is no run
        (out / name).unlink(missing_ok=True)
    remove_checkpoints(out)
    remove_trace(out)
    _remove_empty(out)


def remove_checkpoints(out: Path) -> None:
    """Remove the checkpoints of the run in `out`, and the damaged ones that were set aside."""
    for checkpoint in list(_own(out / names.CHECKPOINTS, SAVED)):
        remove_checkpoint(checkpoint)
    _remove_empty(out / names.CHECKPOINTS)


def remove_trace(out: Path) -> None:
    """Remove the trace of the run in `out`."""
    for file in traced(out):
        file.unlink()
    _remove_empty(out / names.TRACE)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; files of others that lie in it stay in `left-NAME`, for a run may use its name again."""
    for file in list(_own(folder, STATE)):
        file.unlink()
    if not _remove_empty(folder):
        folder.rename(free(folder.with_name(f"left-{folder.name}")))


def _own(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from (path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _remove_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (ENOTEMPTY, EEXIST):
            raise
        return False
    return True
