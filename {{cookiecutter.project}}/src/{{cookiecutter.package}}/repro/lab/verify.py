"""The contract proved for this model and this data: short trainings in many ways must all give the same bits."""

import os
import re
import shutil
import signal
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..asked.params import PARAMS, load
from ..asked.settings import Settings
from ..differences import differences
from ..errors import Failure, Refused
from ..files import read_json
from ..project import Project
from ..records.chain import LINK, STEP
from ..records.names import METRICS, STEP_ROWS
from ..records.opening import told_of, unproven
from ..records.receipt import read
from ..shape import plain
from . import trainings

S = TypeVar("S", bound=Settings)
NOTHING: Mapping[str, Any] = {}
FOLDER = Path("build", "verify")
ROW = STEP.itemsize + LINK  # bytes
SHARD = "parallel.shard"
DIED = re.compile(r"rank \d+ on ")  # so the launcher's line on a rank that crashed begins
LINE = 100  # characters of a refusal that are shown


@dataclass(frozen=True)
class Way:
    """A way to train that must not change a bit."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    ended: signal.Signals | None = None  # by what, on the way; then it is started again

    @property
    def in_pieces(self) -> bool:
        """Whether ranks hold pieces, which some models and optimizers cannot lie in."""
        return SHARD in self.settings

    @property
    def folder(self) -> Path:
        """Its run directory."""
        return FOLDER / self.name.replace(" ", "-")


ONCE, VARIED = Way("one process"), Way("neutral keys varied")
WAYS = (
    Way("once more"),
    Way("1 loader worker", {"loader.workers": 1}),
    Way("2 loader workers", {"loader.workers": 2}),
    Way("2 ranks", ranks=2),
    Way("3 ranks, 1 worker", {"loader.workers": 1}, ranks=3),
    Way("4 ranks", ranks=4),
    Way("optimizer in pieces on 2 ranks", {SHARD: "optimizer"}, ranks=2),
    Way("weights in pieces on 2 ranks", {SHARD: "full"}, ranks=2),
    Way("weights in pieces on 3 ranks", {SHARD: "full"}, ranks=3),
    Way("killed and resumed", ended=signal.SIGKILL),
    Way("killed and resumed on 2 ranks", ranks=2, ended=signal.SIGKILL),
    Way("stopped by SIGTERM and resumed", ended=signal.SIGTERM),
    Way("tracked", {"tracking.enabled": True, "tracking.uri": f"sqlite:///{FOLDER}/mlflow.db"}),
    Way("no trace", {"trace.level": "off"}),
    Way("every tensor traced", {"trace.level": "tensor"}),
    VARIED,
)


@dataclass(frozen=True)
class Row:
    """The outcome of a way: EQUAL, DIFFERS, FAILED, or the reason why it was not tried."""

    name: str
    verdict: str
    weights: str = ""
    trace: str | None = None


def chosen(names: Sequence[str]) -> Sequence[Way]:
    """The ways of these names; all where there are none.

    Raises:
        Refused: there is no such way.
    """
    unknown = [name for name in names if name not in {way.name for way in WAYS}]
    if unknown:
        known = "; ".join(way.name for way in WAYS)
        raise Refused(f"--only {unknown[0]!r}: no such way to train; known: {known}")
    return [way for way in WAYS if not names or way.name in names]


def shortened(schema: type[S], overrides: Sequence[str]) -> tuple[S, dict[str, Any], dict[str, Any]]:
    """The config of a short training, the keys that this overrides, and the neutral ones that are varied.

    Raises:
        Refused: `verify` in params.yaml does not fit the other keys, or varies one that is not neutral.
    """
    asks = load(schema, overrides=overrides).verify
    for name, texts in asks:
        try:
            load(schema, overrides=texts)
        except Refused as refused:
            raise Refused(f"{PARAMS}: verify.{name} does not fit: {refused}") from None
    overrides = (*asks.shorten, *overrides)
    short, varied = load(schema, overrides=overrides), load(schema, overrides=(*overrides, *asks.vary))
    before, after = ({"seed": each.seed, **each.addressed(), **each.environment()} for each in (short, varied))
    if others := differences(before, after):
        field = others[0].field
        raise Refused(f"{PARAMS}: verify.vary: {field} is not neutral, so it asks for another run; leave it out")
    return short, _values(short, overrides), _values(varied, asks.vary)


def places_here(device: str) -> int:
    """How many ranks fit here: one for each GPU, or four on a CPU, where they may share cores."""
    if device == "cpu":
        return 4
    import torch

    return torch.cuda.device_count() or 4


def _values(settings: Settings, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys that overrides name, with their values."""
    return {key: settings.flat()[key] for key in (text.partition("=")[0] for text in overrides)}


def train_in_all_ways(
    project: Project,
    config: Settings,
    places: int,
    settings: Mapping[str, Any],
    tell: Callable[[str], None],
    ways: Sequence[Way] = WAYS,
    vary: Mapping[str, Any] = NOTHING,
) -> Iterator[Row]:
    """Train once, then in each way on at most `places` ranks, with these keys; a row for each as it is done.

    `vary` holds other values of neutral keys.
    """
    shutil.rmtree(project.root / FOLDER, ignore_errors=True)
    (project.root / FOLDER).mkdir(parents=True)
    common = {"tracking.enabled": False, "trace.level": "step", "loader.workers": 0, **settings}
    first = _train(project, ONCE, common)
    if first.weights and (said := told_of(unproven(project.root / ONCE.folder))):
        tell("\n".join(said))
    yield first
    steps = read_json(project.root / ONCE.folder / METRICS)["steps"] if first.weights else 0
    for way in ways if first.weights else ():
        if way.ranks > min(places, config.parallel.shards):
            yield Row(way.name, f"not tried: {places} places for ranks here, {config.parallel.shards} shards")
        elif way.ranks > 1 and config.parallel.reduce == "ddp":
            yield Row(way.name, "not tried: with parallel.reduce=ddp bits depend on the world size")
        elif way is VARIED and not vary:
            yield Row(way.name, "not tried: verify.vary in params.yaml names no key")
        else:
            row = _train(project, way, {**common, **way.settings, **(vary if way is VARIED else {})}, steps)
            if row.weights:
                same = row.weights == first.weights and row.trace in (None, first.trace)
                row = Row(row.name, "EQUAL" if same else "DIFFERS", row.weights, row.trace)
            if row.verdict == "DIFFERS":
                tell(f"see where: repro diff {ONCE.folder} {way.folder}")
            yield row


def _train(project: Project, way: Way, settings: Mapping[str, Any], steps: int = 0) -> Row:
    out = project.root / way.folder
    try:
        if way.ended:
            settings = {**settings, "checkpoint.every": max(1, steps // 6)}
            _kill(project, trainings.command(project, ".train", settings, "--out", out), out, steps // 3, way.ended)
        # torchrun ends with 1 whatever its ranks say; the project's own launcher ends with 2 where they refuse
        ranks, own = (1, ("--ranks", str(way.ranks))) if way.in_pieces else (way.ranks, ())
        trainings.run(project, trainings.command(project, ".train", settings, "--out", out, *own, ranks=ranks))
    except Failure as failure:
        if way.in_pieces and (refusal := _refusal(failure)):
            return Row(way.name, f"not tried: {textwrap.shorten(plain(refusal), LINE, placeholder=' …')}")
        return Row(way.name, f"FAILED: {failure}")
    receipt = read(out)
    return Row(way.name, "EQUAL", receipt.weights, receipt.stated["trace"])


def _refusal(failure: Failure) -> str:
    """The line by which a training refused what it was asked for; nothing where it failed otherwise."""
    if not isinstance(failure, trainings.Ended) or failure.code != Refused.exit_code:
        return ""
    line = failure.said[-1] if failure.said else "refused without a word"
    return "" if DIED.match(line) else line


def _kill(project: Project, words: list[str], out: Path, after: int, by: signal.Signals) -> None:
    """Start a training and end it with this signal once its trace holds more than `after` steps.

    On a busy machine the kill may come too late; then it is tried again, sooner. A training that fails is left to the
    caller, who starts it again.

    Raises:
        Failure: the training ended first each time.
    """
    rows = out / STEP_ROWS
    for steps in (after, after // 2, 0):
        shutil.rmtree(out, ignore_errors=True)
        process = trainings.start(project, words)
        while process.poll() is None and (not rows.is_file() or rows.stat().st_size < (steps + 1) * ROW):
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        if process.wait():
            return
    raise Failure("the training ended before it was killed: make it longer, see verify.shorten in params.yaml")
