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
from ..core.errors import Failure
from ..record import names
from ..record.receipt import Receipt, read
from ..record.view import RunView, is_stated
from ..start import trainings

ASKED = "asked.json"  # beside a run directory: what it was made for. Without it, the run is not whole
# What no training of a series has: it is compared, not kept.
ALONE: Mapping[str, Any] = {
    "tracking.enabled": False,
    "receipt.key": "",
    "trace.level": "step",
    "record.finished": "replace",
}


@dataclass(frozen=True)
class Asked:
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

    asked: Asked
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

    `overrides` hold for all of them, as `--set` takes them. `tell` is called with a line for each training.
    """

    def __init__(
        self,
        project: Project,
        schema: type[Settings],
        folder: Path,
        overrides: Sequence[str] = (),
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.project, self.schema, self.folder = project, schema, folder
        self.overrides, self.tell = tuple(overrides), tell

    def make(self, wanted: Sequence[Asked]) -> Iterator[Made]:
        """Make the trainings in this order, and yield each as it is done; those that are done already are not made.

        Raises:
            Refused: a key or a value is wrong.
            Failure: a training failed.
        """
        width = len(str(len(wanted)))
        for count, asked in enumerate(wanted, 1):
            begun = time.monotonic()
            made, known = self._made(asked)
            took = "made before" if known else f"{time.monotonic() - begun:.1f} s"
            self.tell(f"{count:{width}}/{len(wanted)}  {asked.name}: weights {made.receipt.weights[:16]}, {took}")
            yield made

    def one(self, asked: Asked) -> Made:
        """Train once, without progress output."""
        return self._made(asked)[0]

    def _made(self, asked: Asked) -> tuple[Made, bool]:
        settings = {**ALONE, **asked.settings}
        config = load(self.schema, overrides=(*self.overrides, *trainings.texts(settings)))
        data = trainings.prepared(self.project, config, self.tell)
        wanted = {
            "address": content_address(self.project, config, data, asked.ranks).digest,
            "config": config.flat(),
            "ranks": asked.ranks,
            "variables": dict(asked.variables),
            "number": asked.number,
        }
        folder = self.project.root / self.folder / digest(wanted)[:16]

        def train(run: Path) -> None:
            given = trainings.sets(self.overrides)
            words = trainings.command(self.project, ".train", settings, "--out", run, *given, ranks=asked.ranks)
            trainings.run(self.project, words, environ=environment(self.project, asked))

        return kept(folder, asked, wanted, train)


def kept(folder: Path, asked: Asked, wanted: Any, train: Callable[[Path], None]) -> tuple[Made, bool]:
    """The training in a folder of its own, and whether it was made before; `train` makes it otherwise.

    `wanted` is all that it was made for, as JSON holds it.

    Raises:
        Failure: the training failed.
    """
    if made := _whole(asked, folder, wanted):
        return made, True
    shutil.rmtree(folder, ignore_errors=True)
    train(folder / "run")
    write_json(folder / ASKED, wanted)
    if made := _whole(asked, folder, wanted):
        return made, False
    raise Failure(f"{folder}: the training left no whole record; something else writes there")


def _whole(asked: Asked, folder: Path, wanted: Any) -> Made | None:
    """The training in a folder, if it came to its end and nothing of it has changed since."""
    run = folder / "run"
    try:
        if read_json(folder / ASKED) != wanted:
            return None
        receipt = read(run)
    except Failure:
        return None
    files = [names.WEIGHTS, names.METRICS, *([names.STEP_ROWS] if receipt.stated["trace"] else [])]
    stated = receipt.stated["address"]
    whole = stated == wanted.get("address", stated) and all(is_stated(receipt, name) for name in files)
    return Made(asked, run, receipt) if whole else None


def environment(project: Project, asked: Asked) -> dict[str, str]:
    """The variables of a training. Those of switches are its own to set, so that a relaxed one lacks them."""
    return {**trainings.environment(project, switches=False), **asked.variables}
