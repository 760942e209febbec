"""The local record of a run. The run writes only this; tracking reads it from another process."""

import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.files import durable, read_text, sync, write_json
from ..core.errors import UserError
from . import names
from .reading import metric_rows, read_record


def now() -> int:
    """Milliseconds since 1970, as MLflow counts."""
    return time.time_ns() // 1_000_000


def as_number(name: str, value: Any) -> float:
    """A metric as JSON holds it: whole numbers below 2**53 stay whole, a tensor of one number is that number.

    Raises:
        UserError: it is no number.
    """
    value = value.detach() if hasattr(value, "detach") else value  # torch warns of a graph
    try:
        return int(value) if isinstance(value, int) and abs(value) < 2**53 else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        seen = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise UserError(f"metric {name}: {seen} given, one number wanted") from None


LONGEST = 200  # characters of a file's name
ENDS = "stopped", "best"  # facts of a run that ends early, or not with the weights after its last step


def ends(facts: Mapping[str, Any], steps: int) -> dict[str, str]:
    """Those facts in words, of a run that has made so many steps."""
    words = {}
    if stopped := facts.get("stopped"):
        words["stopped"] = f"after {steps} of {stopped['planned']} steps: {stopped['reason']}"
    if best := facts.get("best"):
        words["best"] = f"the weights after {best['step']} steps: {best['value']}"
    return words


def require_name(name: str) -> str:
    """Refuse a name of a file of the loop's own that would lie elsewhere than below `files/`.

    Raises:
        UserError: it is no relative path of plain parts.
    """
    parts = name.split("/") if isinstance(name, str) and name.isprintable() else []
    if not all(parts) or not parts or any(part[0] in ".-~" for part in parts) or len(name) > LONGEST:
        raise UserError(f"{name!r}: a name such as figures/loss.png wanted, without ., - or ~ before a part")
    return name


def files(folder: Path, facts: Mapping[str, Any]) -> list[Path]:
    """The files of the loop's own that a run's record names. Others may have written it: odd names are left out."""
    found = []
    for name in facts.get("files") or ():
        with suppress(UserError):
            found.append(folder / names.LOGGED_FILES / require_name(name))
    return found


class Record:
    """`run.json` says what the run is; `metrics.jsonl` grows by a row per logged step.

    A row is {"step", "time" (ms), "metrics": {name: number}}. The time is fixed here, once, so that a row
    uploaded twice is the same row. A resumed run that repeats a recorded step must get the same
    numbers; they are not recorded twice.

    Attributes:
        resumed: whether an earlier process began it.
        comparable: whether steps that are made again must give the same numbers; not in another class of environment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.resumed, self.comparable = folder, False, True
        self._known = defaultdict[tuple[int, str], list[float]](list)  # that are to come again, in this order

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json holds."""
        return dict(self._facts)

    @property
    def tags(self) -> dict[str, Any]:
        """What MLflow shows of the run."""
        return dict(self._facts["tags"])

    def unfinished(self) -> bool:
        """Whether the folder holds the record of a run that did not come to its end."""
        path = self.folder / names.RUN
        return path.is_file() and read_record(self.folder, names.RUN)["status"] != "FINISHED"

    def resume(self) -> None:
        """Go on with the folder's record; a row torn by a crash is cut off."""
        self.resumed = True
        self._facts = read_record(self.folder, names.RUN) | {"status": "RUNNING"}
        rows = metric_rows(self.folder)
        write_json(self.folder / names.RUN, self._facts)
        path = self.folder / names.METRIC_ROWS
        whole, newline, _ = read_text(path).rpartition("\n")
        os.truncate(path, len((whole + newline).encode()))  # in place: a crash here loses no row
        for row in rows:
            for name, value in row["metrics"].items():
                self._known[row["step"], name].append(value)
        self._rows = path.open("a", buffering=1)

    def went_on(self, done: int) -> None:
        """Note that the run was resumed after `done` steps. Rows of later ones that cannot be compared are dropped."""
        self.describe(resumed=[*self._facts.get("resumed", []), done])
        if self.comparable:
            return
        path, size = self.folder / names.METRIC_ROWS, 0
        for line, row in zip(path.read_bytes().splitlines(keepends=True), metric_rows(self.folder), strict=True):
            if row["step"] >= done:
                break
            size += len(line)
        os.truncate(path, size)
        self._known.clear()

    def describe(self, **facts: Any) -> None:
        """Note what the run turned out to be."""
        self._facts |= facts
        write_json(self.folder / names.RUN, self._facts)

    def begin(self, patch: bytes = b"", **facts: Any) -> None:
        """Start a new record in place of an older one; `patch` holds the uncommitted changes of the code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in names.REMOVED:
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / names.METRIC_ROWS).touch()
        if patch:
            (self.folder / names.PATCH).write_bytes(patch)
        self._facts = {"id": uuid.uuid4().hex, "started": now(), "status": "RUNNING", **facts}
        write_json(self.folder / names.RUN, self._facts)
        self._rows = (self.folder / names.METRIC_ROWS).open("a", buffering=1)

    def log(self, step: int, metrics: dict[str, float]) -> dict[str, tuple[float, float]]:
        """Append one row. Returns the numbers that an earlier attempt at this run recorded otherwise: then and now."""
        news, others = {}, {}
        for name, value in metrics.items():
            known = self._known[step, name]
            if not known:
                news[name] = value
                continue
            before = known.pop(0)
            if before != value and not (before != before and value != value):  # a NaN is equal to none
                others[name] = before, value
        if news:
            self._rows.write(json.dumps({"step": step, "time": now(), "metrics": news}) + "\n")
        return others

    def keep(self, name: str, write: Callable[[Path], object]) -> None:
        """Have `write` make a file of the loop's own, which has this name below `files/`."""
        path = self.folder / names.LOGGED_FILES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable(path) as beside:
            write(beside)
        if name not in (known := self._facts.get("files", [])):
            self.describe(files=sorted([*known, name]))

    def sync(self) -> None:
        """Return once all rows are on the disk."""
        sync(self._rows.fileno())

    def end(self, status: str, tags: dict[str, str]) -> None:
        """Close the record with MLflow's word for how the run went, FINISHED or FAILED, and the last tags."""
        self.sync()
        self._rows.close()
        self.describe(status=status, ended=now(), tags=self.tags | tags)
