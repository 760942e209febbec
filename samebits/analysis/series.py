"""A series of trainings that a verb compares. Each is made once; an interrupted series goes on where it was."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..address.address import content_address, digest
from ..base.files import read_json, write_json
from ..base.project import Project
from ..config.params import load
from ..config.settings import Settings
from ..core.errors import RunError
from ..record import names
from ..record.receipt import Receipt, read
from ..record.view import RunView, is_stated
from ..start import trainings

REQUESTED = "requested.json"  # beside a run directory: what it was made for. Without it, the run is not whole
# What no training of a series has: it is compared, not kept.
ALONE: Mapping[str, Any] = {
    "tracking.enabled": False,
    "receipt.key": "",
    "trace.level": "step",
    "record.finished": "replace",
}


@dataclass(frozen=True)
class Requested:
    """A training that is wanted.

    Attributes:
        name: for display.
        settings: keys of params.yaml, beside those of the whole series.
        ranks: how many processes train.
        variables: of the environment, such as OMP_NUM_THREADS.
        number: of the repeat, where the same is wanted several times.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class Made:
    """A training that is done: its run directory and its receipt."""

    requested: Requested
    folder: Path
    receipt: Receipt

    @property
    def metrics(self) -> dict[str, float]:
        """Its final metrics, infinities and NaN among them."""
        return {name: float(value) for name, value in self.receipt.stated["metrics"].items()}

    @property
    def bits(self) -> tuple[str, str | None]:
        """What is equal for equal runs: the SHA-256 of the weights, and the trace root."""
        return self.receipt.weights, self.receipt.stated["trace"]

    def seconds(self) -> list[float]:
        """How long each step took on the slowest rank, in seconds."""
        ranks = [np.sum([*rank.seconds.values()], axis=0).tolist() for rank in RunView(self.folder).ranks]
        return [max(step) for step in zip(*ranks, strict=True)]

    def memory(self) -> int:
        """The most memory that a rank held, in bytes."""
        return RunView(self.folder).memory or 0


class Series:
    """Trainings of one project in a folder of their own below build/.

    `overrides` hold for all of them, as `--set` takes them. `report` is called with a line for each training.
    """

    def __init__(
        self,
        project: Project,
        schema: type[Settings],
        folder: Path,
        overrides: Sequence[str] = (),
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.project, self.schema, self.folder = project, schema, folder
        self.overrides, self.report = tuple(overrides), report

    def make(self, wanted: Sequence[Requested]) -> Iterator[Made]:
        """Make the trainings in this order, and yield each as it is done; those that are done already are not made.

        Raises:
            UserError: a key or a value is wrong.
            RunError: a training failed.
        """
        width = len(str(len(wanted)))
        for count, requested in enumerate(wanted, 1):
            begun = time.monotonic()
            made, known = self._made(requested)
            took = "made before" if known else f"{time.monotonic() - begun:.1f} s"
            self.report(f"{count:{width}}/{len(wanted)}  {requested.name}: weights {made.receipt.weights[:16]}, {took}")
            yield made

    def one(self, requested: Requested) -> Made:
        """Train once, without progress output."""
        return self._made(requested)[0]

    def _made(self, requested: Requested) -> tuple[Made, bool]:
        settings = {**ALONE, **requested.settings}
        config = load(self.schema, overrides=(*self.overrides, *trainings.texts(settings)))
        data = trainings.prepared(self.project, config, self.report)
        address = content_address(self.project, config, data)
        wanted = {
            "address": address.digest,
            "code": address.code,  # of two cores with one arithmetic, one may be faster
            "config": config.flat(),
            "ranks": requested.ranks,
            "variables": dict(requested.variables),
            "number": requested.number,
        }
        folder = self.project.root / self.folder / digest(wanted)[:16]

        def train(run: Path) -> None:
            given = trainings.sets(self.overrides)
            words = trainings.command("train", settings, "--out", run, *given, ranks=requested.ranks)
            trainings.run(self.project, words, environ=environment(self.project, requested))

        return kept(folder, requested, wanted, train)


def kept(folder: Path, requested: Requested, wanted: Any, train: Callable[[Path], None]) -> tuple[Made, bool]:
    """The training in a folder of its own, and whether it was made before; `train` makes it otherwise.

    `wanted` is all that it was made for, as JSON holds it.

    Raises:
        RunError: the training failed.
    """
    if made := _whole(requested, folder, wanted):
        return made, True
    shutil.rmtree(folder, ignore_errors=True)
    train(folder / "run")
    write_json(folder / REQUESTED, wanted)
    if made := _whole(requested, folder, wanted):
        return made, False
    raise RunError(f"{folder}: the training left no whole record; something else writes there")


def _whole(requested: Requested, folder: Path, wanted: Any) -> Made | None:
    """The training in a folder, if it came to its end and nothing of it has changed since."""
    run = folder / "run"
    try:
        if read_json(folder / REQUESTED) != wanted:
            return None
        receipt = read(run)
    except RunError:
        return None
    files = [names.WEIGHTS, names.METRICS, *([names.STEP_ROWS] if receipt.stated["trace"] else [])]
    stated = receipt.stated["address"]
    whole = stated == wanted.get("address", stated) and all(is_stated(receipt, name) for name in files)
    return Made(requested, run, receipt) if whole else None


def environment(project: Project, requested: Requested) -> dict[str, str]:
    """The variables of a training. Those of flags are its own to set, so that a relaxed one lacks them."""
    return {**trainings.environment(project, flags=False), **requested.variables}
