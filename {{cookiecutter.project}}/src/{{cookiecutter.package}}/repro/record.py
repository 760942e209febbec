"""The local record of a run. It is written first and alone; tracking reads it from another process."""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from .address import PROJECT
from .errors import Failure
from .files import read_json, write_json

ADDRESS, ENVIRONMENT, METRICS, WEIGHTS = (
    "address.json",
    "environment.json",
    "metrics.json",
    "model.safetensors",
)
RUN, STEPS = "run.json", "metrics.jsonl"
RECEIPT, SIGNATURE, PATCH = "receipt.json", "receipt.json.sig", "code.patch"
OUTCOME = (STEPS, METRICS, WEIGHTS, RECEIPT, SIGNATURE, PATCH)

# What a run reads of the project, and git keeps: nothing else of the work tree reaches a record.
READ = ("src", "requirements", "params.yaml", "pyproject.toml", "dvc.yaml", ":(glob)**/*.dvc")


def now() -> int:
    """Milliseconds since 1970, as MLflow counts."""
    return time.time_ns() // 1_000_000


def code_state() -> tuple[dict[str, Any], bytes]:
    """The project's git commit, and what the files that a run reads have beyond it, as a patch (empty: nothing).

    The facts are {"commit", "dirty", "patch": SHA-256}; all None outside git.
    """
    try:
        head = _git("rev-parse", "HEAD").decode().strip()
        patch = _patch()
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None, "patch": None}, b""
    return {"commit": head, "dirty": bool(patch), "patch": hashlib.sha256(patch).hexdigest() if patch else None}, patch


def _patch() -> bytes:
    """The difference of the work tree from the last commit, new files included; git's own index stays as it is."""
    plain = ("--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    prefixes = ("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false")
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder, "index")
        own = PROJECT / _git("rev-parse", "--git-path", "index").decode().strip()
        if own.is_file():
            shutil.copyfile(own, index)
        _git("add", "--intent-to-add", "--", ".", index=index)
        return _git(*prefixes, "diff", *plain, "HEAD", "--", *READ, index=index)


def _git(*arguments: str, index: Path | None = None) -> bytes:
    env = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    return subprocess.run(["git", *arguments], cwd=PROJECT, env=env, check=True, capture_output=True).stdout


class Record:
    """`run.json` says what the run is; `metrics.jsonl` grows by a row per logged step.

    A row is {"step", "time" (ms), "metrics": {name: number}}. The time is fixed here, once, so that a row
    uploaded twice is the same row. A resumed run that comes by a recorded step again must find the same
    numbers; they are not recorded twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[int, str], float] = {}

    def unfinished(self) -> bool:
        """Whether the folder holds the record of a run that did not come to its end."""
        path = self.folder / RUN
        return path.is_file() and read_json(path)["status"] != "FINISHED"

    def resume(self) -> None:
        """Go on with the folder's record; a row torn by a crash is cut off."""
        self._facts = read_json(self.folder / RUN) | {"status": "RUNNING"}
        write_json(self.folder / RUN, self._facts)
        path = self.folder / STEPS
        whole, newline, _ = path.read_text().rpartition("\n")
        os.truncate(path, len((whole + newline).encode()))  # in place: a crash here loses no row
        for row in map(json.loads, whole.splitlines()):
            self._known |= {(row["step"], name): value for name, value in row["metrics"].items()}
        self._rows = path.open("a", buffering=1)

    def went_on(self, done: int) -> None:
        """Note that the run was resumed after `done` steps."""
        self._facts["resumed"] = [*self._facts.get("resumed", []), done]
        write_json(self.folder / RUN, self._facts)

    def begin(self, patch: bytes = b"", **facts: Any) -> None:
        """Start a new record in the folder, replacing an older run's; `patch` is what the code has uncommitted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in OUTCOME:
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / STEPS).touch()
        if patch:
            (self.folder / PATCH).write_bytes(patch)
        self._facts = {"id": uuid.uuid4().hex, "started": now(), "status": "RUNNING", **facts}
        write_json(self.folder / RUN, self._facts)
        self._rows = (self.folder / STEPS).open("a", buffering=1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row.

        Raises:
            Failure: an earlier attempt at this run recorded another number for the same step.
        """
        for name, value in metrics.items():
            before = self._known.get((step, name), value)
            if before != value and not (before != before and value != value):  # a NaN is equal to none
                raise Failure(
                    f"step {step}: {name} was {before!r} before the interruption and is {value!r} now: "
                    f"the resumed run is not the same run"
                )
        news = {name: value for name, value in metrics.items() if (step, name) not in self._known}
        if news:
            self._rows.write(json.dumps({"step": step, "time": now(), "metrics": news}) + "\n")

    def sync(self) -> None:
        """Return once all rows are on the disk."""
        os.fsync(self._rows.fileno())

    def end(self, status: str, tags: dict[str, str]) -> None:
        """Close the record with MLflow's word for how the run went, FINISHED or FAILED, and the last tags."""
        self.sync()
        self._rows.close()
        self._facts |= {"status": status, "ended": now(), "tags": self._facts["tags"] | tags}
        write_json(self.folder / RUN, self._facts)
