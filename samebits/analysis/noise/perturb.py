"""How far one ULP grows: a training in which one number is changed by one, beside the same training without it.

Both are made in a child (`perturbed.py`), on one process, in a folder of their own that is removed afterwards.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Any

from ...base.files import exact, read_json, write_json
from ...base.project import Project
from ...base.shape import plain
from ...config.settings import Settings
from ...core.errors import RunError, UserError
from ...core.flags import stated_variables
from ...record.names import METRICS
from ...record.reading import metric_rows, read_record
from ...start import trainings
from .. import diff
from ..groups import named
from ..results import RESULTS, STEPS, accepted_change
from ..series import ALONE
from ..table import table
from .distance import distance
from .noise import LOSS, requested_for
from .perturbed import CHANGED, CONTROL

REPORT = "perturb.json"
SATURATED = 0.1  # of the largest distance: where growth ends
FEWEST = 3  # rows that show a growth


@dataclass(frozen=True)
class Row:
    """A step: the distance of the weights after it (see `distance`), and of the losses that it logged."""

    step: int
    weights: float
    loss: float | None


@dataclass(frozen=True)
class Growth:
    """The least-squares slope of the logarithm of the distance of weights over steps.

    Attributes:
        exponent: per step.
        doubling: the steps in which the distance doubles; None where it does not grow.
        rows: how many rows there are from step `first` to step `last`.
    """

    exponent: float
    doubling: float | None
    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class Moved:
    """A final metric of both trainings; `accepted` is None where results.lock says nothing of it."""

    control: float
    perturbed: float
    accepted: float | None

    @property
    def by(self) -> float:
        """How far it moved: not at all where both are the same, an infinity too."""
        return 0.0 if self.control == self.perturbed else abs(self.perturbed - self.control)

    @property
    def harmless(self) -> bool:
        """Whether that is accepted."""
        return self.accepted is None or self.by <= self.accepted  # NaN is not


@dataclass(frozen=True)
class Perturbation:
    """What one ULP did.

    Attributes:
        changed: the tensor, the index of its element, and its value before and after.
        first: the first difference that the traces show, in words; None where they show none.
        lacking: metrics that results.lock names and the run does not have.
    """

    kind: str
    at: int
    steps: int
    changed: dict[str, Any]
    first: str | None
    rows: list[Row]
    growth: Growth | None
    metrics: dict[str, Moved]
    key: str
    lacking: list[str]

    @property
    def holds(self) -> bool:
        """Whether all that it did is accepted."""
        return not self.lacking and all(moved.harmless for moved in self.metrics.values())

    @property
    def verdicts(self) -> list[str]:
        """A sentence for each metric."""
        lines = [self._verdict(name, moved) for name, moved in self.metrics.items()]
        lines += [f"not judged: {RESULTS} names {named(name)}, and the run has no such metric" for name in self.lacking]
        return [plain(line) for line in lines]

    def _verdict(self, name: str, moved: Moved) -> str:
        said = f"{named(name)} moved by {moved.by:.4g}"
        if moved.accepted is None:
            return f"not judged: {said}, and {self.key} in {RESULTS} does not name it"
        if math.isnan(moved.by):
            return f"it matters: {named(name)} is {moved.control!r} without the change and {moved.perturbed!r} with it"
        word = "harmless" if moved.harmless else "it matters"
        return f"{word}: {said}, {'within' if moved.harmless else 'more than'} {moved.accepted:g}"

    def record(self) -> dict[str, Any]:
        """As JSON has it: a number that is not finite is text."""
        metrics = {name: {**vars(moved), "moved": moved.by} for name, moved in self.metrics.items()}
        facts = {name: getattr(self, name) for name in ("kind", "at", "steps", "changed", "first", "verdicts")}
        growth = vars(self.growth) if self.growth else None
        held = exact({"rows": [*map(vars, self.rows)], "metrics": metrics})
        return {**facts, **held, "growth": growth, "holds": self.holds}

    def lines(self) -> Iterator[str]:
        """The verdicts, what was changed, the table, and the growth."""
        yield from self.verdicts
        place, changed = ", ".join(map(str, self.changed["index"])), self.changed
        yield plain(
            f"changed at step {self.at}: {changed['tensor']}, element ({place}), "
            f"from {changed['before']!r} to {changed['after']!r}"
        )
        yield f"first difference of the traces: {self.first or 'none, so the change had no effect'}"
        rows = [
            [str(row.step), f"{row.weights:.3g}", "-" if row.loss is None else f"{row.loss:.3g}"] for row in self.rows
        ]
        yield from ["", *table(["after step", "weights", "loss"], rows), ""]  # fmt: skip
        grows = any(row.weights for row in self.rows)
        yield _growing(self.growth) if grows else "growth: none, the change has reached no weight in the table"


def perturbation(
    project: Project, schema: type[Settings], overrides: Sequence[str], kind: str, at: int, short: bool, out: Path,
    report: Callable[[str], None],
) -> Perturbation:  # fmt: skip
    """Make both trainings and compare them; perturb.json in `out` holds the same.

    Raises:
        UserError: a key is wrong, there is no such step, there is nothing to change, or results.lock accepts nothing.
        RunError: a training failed.
    """
    settings, overrides = requested_for(schema, overrides, short)
    key, accepted = accepted_change(project)
    (project.root / out).mkdir(parents=True, exist_ok=True)
    # removed at the end: an honest run gives another outcome than the first of them
    with TemporaryDirectory(prefix="perturb-", dir=project.root / out) as folder:
        folders = Path(folder, kind), Path(folder, CONTROL)
        for place, name in zip(folders, (f"{kind} changed at step {at}", "nothing changed"), strict=True):
            train(project, settings, overrides, place, at)
            report(f"{name}: done")
        found = compared(*folders, kind, at, key, accepted)
    write_json(project.root / out / REPORT, found.record())
    return found


def train(project: Project, settings: Settings, overrides: Sequence[str], folder: Path, at: int) -> None:
    """Make a training in a new folder, whose name is the kind of change.

    Raises:
        UserError: the training refused what it was given.
        RunError: it failed.
    """
    folder.mkdir(parents=True)
    own, given = (folder, folder.name, str(at)), trainings.sets(overrides)
    words = trainings.command(trainings.PERTURBED, ALONE, *own, "--out", folder / "run", *given)
    environ = trainings.environment(project, flags=False)
    try:
        trainings.run(project, words, environ=environ | stated_variables(settings.options.determinism, environ))
    except trainings.Ended as ended:
        kind = UserError if ended.code == UserError.exit_code else RunError
        raise kind(ended.last or f"the training ended with {ended.code}") from None


def compared(perturbed: Path, control: Path, kind: str, at: int, key: str, accepted: dict[str, float]) -> Perturbation:
    stated = read_json(perturbed / CHANGED)
    runs = perturbed / "run", control / "run"
    if kind != CONTROL and not stated["changed"]:
        ended = int(read_record(runs[0], METRICS)[STEPS])
        raise UserError(f"--at {at} seen, at most {ended - 1} wanted: the run ended itself after {ended} steps")
    losses = [{row["step"]: row["metrics"][LOSS] for row in metric_rows(run) if LOSS in row["metrics"]} for run in runs]
    rows = [
        Row(
            step,
            distance(control / f"{step}.safetensors", perturbed / f"{step}.safetensors"),
            abs(losses[0][step] - losses[1][step]) if all(step in each for each in losses) else None,
        )
        for step in stated["probes"]
        if all((of / f"{step}.safetensors").is_file() for of in (control, perturbed))  # either may have ended early
    ]
    metrics = [read_record(run, METRICS) for run in runs]
    place = diff.first_place(*map(diff.load, runs))
    moved = {
        name: Moved(float(metrics[1][name]), float(metrics[0][name]), accepted.get(name))
        for name in sorted(set(metrics[0]) & set(metrics[1]) - {STEPS})
    }
    lacking = sorted(accepted.keys() - moved.keys())
    growth = growing([row for row in rows if row.step >= at])
    return Perturbation(
        kind, at, stated["steps"], stated["changed"], str(place) if place else None, rows, growth, moved, key, lacking
    )


def growing(rows: Sequence[Row]) -> Growth | None:
    """How the distance of weights grows from the first row to the one in which it reaches a tenth of its largest.

    Rows without distance, before the change shows, do not count. None where fewer than three rows are left, or where
    a distance is no finite number.
    """
    seen = [row for row in rows if row.weights]
    if not seen or not all(math.isfinite(row.weights) for row in seen):
        return None
    largest = max(row.weights for row in seen)
    end = next(place for place, row in enumerate(seen) if row.weights >= SATURATED * largest)
    part = seen[: end + 1]
    if len(part) < FEWEST:
        return None
    slope = linear_regression([row.step for row in part], [math.log(row.weights) for row in part]).slope
    return Growth(slope, math.log(2) / slope if slope > 0 else None, part[0].step, part[-1].step, len(part))


def _growing(growth: Growth | None) -> str:
    if not growth:
        return f"growth: not known, for fewer than {FEWEST} steps of the table show it before it is at its largest"
    speed = f"doubles every {growth.doubling:.3g} steps" if growth.doubling else "does not grow"
    return (
        f"growth: the distance of weights {speed} (exponent {growth.exponent:.3g} per step; least squares over "
        f"{growth.rows} rows, steps {growth.first} … {growth.last}, until a tenth of the largest distance)"
    )
