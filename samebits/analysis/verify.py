"""The contract proved for this model and this data: short trainings in many ways must all give the same bits."""

import json
import math
import os
import shutil
import signal
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ..base.project import NAME, Project
from ..base.shape import plain
from ..base.text import differences
from ..config.params import PARAMS, load
from ..config.settings import Settings
from ..core.errors import RunError, UserError
from ..core.flags import stated_variables
from ..prove.fresh import Fresh
from ..record.names import CHECKPOINTS, METRIC_ROWS
from ..record.opening import non_portable, reported_of
from ..record.receipt import read
from ..start import trainings
from ..start.ranks import handling
from ..start.warm import Warm

S = TypeVar("S", bound=Settings)
Start = Callable[["Way", Mapping[str, Any]], trainings.Process]  # of a training in this way, with these keys
NOTHING: Mapping[str, Any] = {}
FOLDER = Path("build", "verify")
COPY = ".project"  # in which trainings in other circumstances lie; hidden, for it is removed
SHARD = "parallel.shard"
TRIES = 3  # to kill a training before it ends
PAUSE = 0.005  # seconds between two looks at a training
LINE = 300  # characters of a refusal that are shown: its remedy stands at its end
LINES = 12  # of what a training that failed has printed


@dataclass(frozen=True)
class Way:
    """A way to train that must not change a bit."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    ended: signal.Signals | None = None  # by what, on the way; then it is started again
    instant: Callable[[int, float], int] = lambda steps, epochs: steps // 3  # after how many of its steps
    cold: bool = False  # whether it starts as a user starts it, by torchrun where it has several ranks
    module: str = ""  # of the analysis, that trains in place of `samebits train`
    given: Sequence[str] = ()  # to that module, before the arguments of `train`
    elsewhere: bool = False  # whether it starts in other circumstances, and in a copy of the project

    @property
    def folder(self) -> Path:
        """Its run directory."""
        return FOLDER / self.name.replace(" ", "-")

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.folder.with_suffix(".log")


def behind_an_epoch(steps: int, epochs: float) -> int:
    """The first step that begins in the second epoch; half of the steps where there is none."""
    return math.floor(steps / epochs) + 1 if epochs >= 1 and math.floor(steps / epochs) + 1 < steps else steps // 2


def in_the_last_third(steps: int, epochs: float) -> int:
    """Three quarters of the steps."""
    return steps - steps // 4


TRACKED = {"tracking.enabled": True, "tracking.uri": f"sqlite:///{FOLDER}/mlflow.db"}
ONCE, VARIED = Way("one process", cold=True), Way("neutral keys varied")
WAYS = (
    Way("once more"),
    Way("2 loader workers", {"loader.workers": 2}),
    Way("2 ranks", ranks=2, cold=True),
    Way("3 ranks, 1 worker", {"loader.workers": 1}, ranks=3),
    Way("4 ranks", ranks=4),
    Way("optimizer sharded on 2 ranks", {SHARD: "optimizer"}, ranks=2),
    Way("weights sharded on 2 ranks", {SHARD: "full"}, ranks=2),
    Way("weights sharded on 3 ranks", {SHARD: "full"}, ranks=3),
    Way("killed and resumed", ended=signal.SIGKILL, instant=in_the_last_third),
    Way("killed and resumed on 2 ranks", ranks=2, ended=signal.SIGKILL, instant=behind_an_epoch),
    Way("stopped by SIGTERM and resumed", ended=signal.SIGTERM),
    Way("tracked, every tensor traced", {"trace.level": "tensor", **TRACKED}),
    Way("no trace", {"trace.level": "off"}),
    Way("other circumstances", elsewhere=True),
    VARIED,
)


@dataclass(frozen=True)
class Row:
    """The outcome of a way: EQUAL, DIFFERS, FAILED, or the reason why it was not tried."""

    name: str
    verdict: str
    weights: str = ""
    trace: str | None = None
    control: bool = False  # whether it must differ


def chosen(names: Sequence[str]) -> Sequence[Way]:
    """The ways of these names; all where there are none.

    Raises:
        UserError: there is no such way.
    """
    unknown = [name for name in names if name not in {way.name for way in WAYS}]
    if unknown:
        known = "; ".join(way.name for way in WAYS)
        raise UserError(f"--only {unknown[0]!r}: no such way to train; known: {known}")
    return [way for way in WAYS if not names or way.name in names]


def shortened(
    schema: type[S], overrides: Sequence[str], full: bool = False
) -> tuple[S, dict[str, Any], dict[str, Any]]:
    """The config of a short training, or of a `full` one, the keys that this overrides, and neutral ones to vary.

    Raises:
        UserError: `verify` in params.yaml does not fit the other keys, or varies one that is not neutral.
    """
    asks = load(schema, overrides=overrides).verify
    for name, texts in asks:
        try:
            load(schema, overrides=texts)
        except UserError as refused:
            raise UserError(f"{PARAMS}: verify.{name} does not fit: {refused}") from None
    overrides = overrides if full else (*asks.shorten, *overrides)
    short, varied = load(schema, overrides=overrides), load(schema, overrides=(*overrides, *asks.vary))
    before, after = ({"seed": each.seed, **each.addressed(), **each.environmental()} for each in (short, varied))
    if others := differences(before, after):
        field = others[0].field
        raise UserError(f"{PARAMS}: verify.vary: {field} is not neutral, so it asks for another run; leave it out")
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


@contextmanager
def starting(project: Project, config: Settings, report: Callable[[str], None]) -> Iterator[Start]:
    """Trainings in `project`: forks of a process that has torch loaded, or processes of their own where the way asks.

    What a training prints goes to a file beside its folder.

    Raises:
        UserError: a variable contradicts the flags.
    """
    environ = trainings.environment(project)
    environ |= stated_variables(config.options.determinism, environ)

    def start(way: Way, settings: Mapping[str, Any]) -> trainings.Process:
        arguments = ["--out", str(project.root / way.folder), *trainings.overrides(settings)]
        log = project.root / way.log
        # where no flag fixes the threads, torchrun gives a rank other ones, and a fork cannot change its own
        if way.cold or (way.ranks > 1 and "OMP_NUM_THREADS" not in environ):
            return trainings.start(project, trainings.command("train", {}, *arguments, ranks=way.ranks), log)
        words = [way.module, *way.given] if way.module else [NAME, "train"]
        return (fresh() if way.elsewhere else warm).start(words[0], [*words[1:], *arguments], log, way.ranks)

    @cache
    def fresh() -> Warm:
        copy = project.root / FOLDER / COPY
        stack.callback(shutil.rmtree, copy, ignore_errors=True)
        other = stack.enter_context(Fresh(project, config, {}, copy))
        while not other.has_begun:
            time.sleep(PAUSE)
        for name, why in other.not_tried.items():
            report(f"{name}: not changed: {why}")
        return other

    with ExitStack() as stack, Warm(project, environ) as warm:
        yield start


def train_in_all_ways(
    project: Project,
    config: Settings,
    places: int,
    start: Start,
    settings: Mapping[str, Any],
    report: Callable[[str], None],
    ways: Sequence[Way] = WAYS,
    vary: Mapping[str, Any] = NOTHING,
) -> Iterator[Row]:
    """Train once, then in each way on at most `places` ranks, with these keys; a row for each as it is done.

    `vary` holds other values of neutral keys.
    """
    shutil.rmtree(project.root / FOLDER, ignore_errors=True)
    (project.root / FOLDER).mkdir(parents=True)
    common = {"tracking.enabled": False, "trace.level": "step", "loader.workers": 0, **settings}
    first = _train(project, ONCE, common, start)
    if first.weights and (said := reported_of(non_portable(project.root / ONCE.folder))):
        report("\n".join(said))
    yield first
    length = length_of(project.root / ONCE.folder) if first.weights else (0, 0.0)
    for way in ways if first.weights else ():
        if way.ranks > min(places, config.parallel.micro_batches):
            seen = f"{places} places for ranks here, {config.parallel.micro_batches} micro-batches"
            yield Row(way.name, f"not tried: {seen}")
        elif way is VARIED and not vary:
            yield Row(way.name, "not tried: verify.vary in params.yaml names no key")
        else:
            row = _train(project, way, {**common, **way.settings, **(vary if way is VARIED else {})}, start, *length)
            if row.weights:
                same = row.weights == first.weights and row.trace in (None, first.trace)
                row = Row(row.name, "EQUAL" if same else "DIFFERS", row.weights, row.trace)
            if row.verdict == "DIFFERS":
                report(f"see where: samebits diff {ONCE.folder} {way.folder}")
            yield row


def length_of(out: Path) -> tuple[int, float]:
    """How many steps a finished run has, and how many epochs."""
    last = json.loads((out / METRIC_ROWS).read_bytes().splitlines()[-1])
    return last["step"] + 1, last["metrics"]["epoch"]


def _train(
    project: Project, way: Way, settings: Mapping[str, Any], start: Start, steps: int = 0, epochs: float = 0.0
) -> Row:
    out, log = project.root / way.folder, project.root / way.log
    try:
        if way.ended:
            at = max(1, way.instant(steps, epochs))
            settings = {**settings, "checkpoint.every": at, "checkpoint.keep": 9}
            _kill(partial(start, way, settings), out, at, way.ended)
        log.unlink(missing_ok=True)
        _, code = watched(partial(start, way, settings))
    except RunError as failure:
        return Row(way.name, f"FAILED: {failure}")
    if code:
        if SHARD in way.settings and code == UserError.exit_code:  # which some models and optimizers do not allow
            said = log.read_text(errors="replace").splitlines()
            refusal = plain(said[-1]) if said else "refused without a word"
            return Row(way.name, f"not tried: {textwrap.shorten(refusal, LINE, placeholder=' …')}")
        return Row(way.name, said_by(project, way, code))
    receipt = read(out)
    return Row(way.name, "EQUAL", receipt.weights, receipt.stated["trace"])


def said_by(project: Project, way: Way, code: int | None) -> str:
    """The verdict on a training that failed, with what it has said last."""
    said = (project.root / way.log).read_text(errors="replace").splitlines()[-LINES:]
    return "\n".join([f"FAILED: it ended with {code}:", *said])


def _checkpoints(out: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run, each with how many steps it has done."""
    return [(int(folder.name[:9]), folder) for folder in (out / CHECKPOINTS).glob("[0-9]*")]


def watched(
    start: Callable[[], trainings.Process], enough: Callable[[], bool] = lambda: False
) -> tuple[trainings.Process, int | None]:
    """A training that is started here, and its exit code; None as soon as there is `enough` of it.

    Who interrupts this ends the training, too: it is in a session of its own, where Ctrl-C does not reach it. An
    exception might come while it is started, when nobody knows it yet; so Ctrl-C is noted, and heeded here.
    """
    interrupted: list[int] = []
    with handling(lambda number, frame: interrupted.append(number), [signal.SIGINT]):
        process = start()
        try:
            while (code := process.poll()) is None and not enough():
                if interrupted:
                    raise KeyboardInterrupt
                time.sleep(PAUSE)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    return process, code


def _kill(start: Callable[[], trainings.Process], out: Path, after: int, by: signal.Signals) -> None:
    """Start a training and end it with this signal once it holds the checkpoint of step `after`, from which it goes on.

    On a busy machine the kill may come late: checkpoints that were made meanwhile are removed, and where the training
    has ended, it is tried again. A training that fails is left to the caller, who starts it again.

    Raises:
        RunError: the training ended first each time.
    """
    for _ in range(TRIES):
        shutil.rmtree(out, ignore_errors=True)
        process, _ = watched(start, lambda: any(step >= after for step, _ in _checkpoints(out)))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        if process.wait():
            for step, folder in _checkpoints(out) if by == signal.SIGKILL else ():
                shutil.rmtree(folder) if step > after else None
            return
    raise RunError("the training ended before it was killed: make it longer, see verify.shorten in params.yaml")
