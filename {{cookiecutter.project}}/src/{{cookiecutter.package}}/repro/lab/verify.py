"""The contract proved here, for this model and this data: short trainings that must all give the same bits."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..address import PROJECT
from ..errors import Failure
from ..files import read_json
from ..record import STEPS
from ..settings import Settings
from . import launched, receipts

FOLDER = Path("build", "verify")


@dataclass(frozen=True)
class Way:
    """A way to make the run that must not change a bit."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    killed: bool = False

    @property
    def folder(self) -> Path:
        """Its run directory."""
        return FOLDER / self.name.replace(" ", "-")


ONCE = Way("one process")
WAYS = (
    Way("once more"),
    Way("1 loader worker", {"loader.workers": 1}),
    Way("2 loader workers", {"loader.workers": 2}),
    Way("2 ranks", ranks=2),
    Way("3 ranks, 1 worker", {"loader.workers": 1}, ranks=3),
    Way("4 ranks", ranks=4),
    Way("killed and resumed", killed=True),
    Way("killed and resumed on 2 ranks", ranks=2, killed=True),
    Way("tracked", {"tracking.enabled": True, "tracking.uri": f"sqlite:///{FOLDER}/mlflow.db"}),
    Way("no trace", {"trace.level": "off"}),
    Way("every tensor traced", {"trace.level": "tensor"}),
)


@dataclass(frozen=True)
class Row:
    """What a way gave: EQUAL, DIFFERS, FAILED, or why it was not tried."""

    name: str
    verdict: str
    weights: str = ""
    trace: str | None = None


def verify(config: Settings, places: int, settings: Mapping[str, Any], tell: Callable[[str], None]) -> Iterator[Row]:
    """Train in every way on at most `places` ranks, with these keys; a row for each as it is done."""
    shutil.rmtree(PROJECT / FOLDER, ignore_errors=True)
    (PROJECT / FOLDER).mkdir(parents=True)
    common = {"tracking.enabled": False, "trace.level": "step", "loader.workers": 0, **settings}
    first = _train(ONCE, common)
    yield first
    steps = read_json(PROJECT / ONCE.folder / "metrics.json")["steps"] if first.weights else 0
    for way in WAYS if first.weights else ():
        if way.ranks > min(places, config.parallel.shards):
            yield Row(way.name, f"not tried: {places} places for ranks here, {config.parallel.shards} shards")
        elif way.ranks > 1 and config.parallel.reduce == "ddp":
            yield Row(way.name, "not tried: with parallel.reduce=ddp bits depend on the world size")
        else:
            row = _train(way, {**common, **way.settings}, steps)
            if row.weights:
                same = row.weights == first.weights and row.trace in (None, first.trace)
                row = Row(row.name, "EQUAL" if same else "DIFFERS", row.weights, row.trace)
            if row.verdict == "DIFFERS":
                tell(f"see where: repro diff {ONCE.folder} {way.folder}")
            yield row


def _train(way: Way, settings: Mapping[str, Any], steps: int = 0) -> Row:
    out = PROJECT / way.folder
    try:
        if way.killed:
            settings = {**settings, "checkpoint.every": max(1, steps // 6)}
            _kill(launched.command(".train", settings, "--out", out), out / STEPS, steps // 3)
        launched.run(launched.command(".train", settings, "--out", out, ranks=way.ranks))
    except Failure as failure:
        return Row(way.name, f"FAILED: {failure}")
    receipt = receipts.read(out)
    return Row(way.name, "EQUAL", receipt.weights, receipt.stated["trace"])


def _kill(words: list[str], rows: Path, after: int) -> None:
    """Start a training and kill it (SIGKILL) once it has recorded more than `after` steps."""
    process = launched.start(words)
    while process.poll() is None and (not rows.is_file() or rows.read_bytes().count(b"\n") <= after):
        time.sleep(0.005)
    if process.poll() is not None:
        raise Failure("the training ended before it was killed; verify a longer one, with --epochs")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
