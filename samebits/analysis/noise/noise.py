"""The noise floor: how far trainings of one content address differ with the flags off, beside how far seeds differ.

Three groups of trainings: `strict` ones must have equal bits; `relaxed` ones have all flags off, and a thread on
each core; `seeds` are strict ones over seeds. They take turns, so that a drift of the machine meets all groups alike.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.files import exact, write_json
from ...base.project import Project
from ...base.shape import plain
from ...config.params import load
from ...config.settings import Settings
from ...core.errors import UserError
from ...record.names import WEIGHTS
from ...record.reading import metric_rows
from ...start import trainings
from .. import statistics
from ..groups import LARGEST, named
from ..results import STEPS
from ..series import Made, Requested, Series
from ..table import table
from ..verify import shortened
from .distance import distance

REPORT = "noise.json"
GROUPS = ("strict", "relaxed", "seeds")
RELAXED: Mapping[str, Any] = {"determinism.relax": ["all"], "determinism.cpu": "native"}
LOSS, LAST_LOSS = "loss", "last_loss"  # a number that the loop logs, and the metric that its last value is
# Runs of a group -> in how many of 100 cases its interval holds the true deviation, see `deviation_interval`.
COVERAGE = {5: 65, 10: 82, 20: 89}


@dataclass(frozen=True)
class Spread:
    """A metric of the runs of a group.

    Attributes:
        deviation: the standard deviation (of n - 1); like the mean None where a value is no number to reckon with.
        low: of a 95 % bootstrap interval of the deviation, like `high`; None where there is none.
    """

    values: list[float]
    mean: float | None
    deviation: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Group:
    """Runs that are compared with one another.

    Attributes:
        runs: the names of their receipts.
        folders: their run directories, from the project's root.
        metrics: by name, without `steps`.
        distances: of the weights of each run but the first from those of the first, see `distance`.
    """

    runs: list[str]
    folders: list[str]
    names: list[str]
    equal_bits: bool
    metrics: dict[str, Spread]
    distances: list[float]


@dataclass(frozen=True)
class Noise:
    """All that is said about the groups; `holds` if the strict runs have equal bits."""

    groups: dict[str, Group]
    notes: list[str]
    verdicts: list[str]
    threads: int

    @property
    def holds(self) -> bool:
        """Whether the contract does."""
        return self.groups["strict"].equal_bits

    def record(self) -> dict[str, Any]:
        """As JSON has it: a number that is not finite is text, as in a receipt."""
        return exact(asdict(self))

    def lines(self) -> Iterator[str]:
        """The verdicts, a table, and the notes."""
        yield from self.verdicts
        rows = [
            [named(metric), name, *map(_number, (each.mean, each.deviation, each.low, each.high))]
            for metric in self.groups["strict"].metrics
            for name, group in self.groups.items()
            for each in [group.metrics[metric]]
        ]
        yield from ["", *table(["metric", "group", "mean", "deviation", "from", "to (95 %)"], rows), ""]
        for name, group in self.groups.items():
            farthest = max(group.distances, key=lambda each: (math.isnan(each), each))
            yield f"weights, {name}: at most {farthest:.2g} from those of the group's first run (relative L2 distance)"
        yield from self.notes


def noise(
    project: Project,
    schema: type[Settings],
    overrides: Sequence[str],
    runs: int,
    short: bool,
    out: Path,
    report: Callable[[str], None],
) -> Noise:
    """Make the trainings that are not made yet, in `out`, and compare them; noise.json there holds the same.

    Raises:
        UserError: fewer than 2 runs, or a key is wrong.
        RunError: a training failed.
    """
    if runs < 2:
        raise UserError(f"--runs {runs} seen, 2 or more wanted: one run has no spread")
    settings, overrides = requested_for(schema, overrides, short)
    load(schema, overrides=(*overrides, f"seed={settings.seed + runs - 1}"))  # refused now, and not after hours
    threads = len(os.sched_getaffinity(0))
    wanted = planned(settings.seed, runs, threads)
    series = Series(project, schema, out, overrides, report)
    made = dict(zip(wanted, series.make(list(wanted.values())), strict=True))
    made["seeds", 0] = made["strict", 0]
    found = compared(project, {name: [made[name, count] for count in range(runs)] for name in GROUPS}, threads)
    (project.root / out).mkdir(parents=True, exist_ok=True)
    write_json(project.root / out / REPORT, found.record())
    return found


def requested_for(schema: type[Settings], overrides: Sequence[str], short: bool) -> tuple[Settings, Sequence[str]]:
    """The config of the strict trainings, and the overrides that make it; `short` adds `verify.shorten`.

    Raises:
        UserError: a key is wrong, or a flag is left off.
    """
    settings = load(schema, overrides=overrides)
    if short:
        settings, requested, _ = shortened(schema, overrides)
        overrides = trainings.texts(requested)
    if relaxed := settings.determinism.relax:
        raise UserError(f"determinism.relax={json.dumps(relaxed)} seen, [] wanted: samebits noise relaxes runs itself")
    return settings, overrides


def planned(seed: int, runs: int, threads: int) -> dict[tuple[str, int], Requested]:
    """The trainings by group and number, in the order in which they are made; the first of seeds is the strict one."""
    found: dict[tuple[str, int], Requested] = {}
    for count in range(runs):
        variables = {"OMP_NUM_THREADS": str(threads)}
        found["strict", count] = Requested(f"strict {count}", number=count)
        found["relaxed", count] = Requested(f"relaxed {count}", RELAXED, variables=variables, number=count)
        if count:
            found["seeds", count] = Requested(f"seed {seed + count}", {"seed": seed + count})
    return found


def compared(project: Project, runs: Mapping[str, Sequence[Made]], threads: int) -> Noise:
    """What these runs of the three groups say, in numbers and in words."""
    metrics = {name: [_metrics(each) for each in group] for name, group in runs.items()}
    held = [set(each) for group in metrics.values() for each in group]
    both = sorted(set.intersection(*held) - {STEPS})
    groups = {name: _group(project, group, metrics[name], both) for name, group in runs.items()}
    of = [groups[name] for name in GROUPS]
    verdicts = [_of_strict(groups["strict"], runs["strict"]), _of_relaxed(groups["relaxed"], threads)]
    verdicts += [verdict(metric, *(group.metrics[metric] for group in of[1:])) for metric in both]
    left = sorted(set().union(*held) - {STEPS, *both})
    notes = [f"{named(name)}: left out, as some runs do not have it" for name in left]
    for name, group in runs.items():
        if len({each.receipt.stated["environment"]["environment"] for each in group}) > 1:
            said = "so their spread is not this machine's; remove the folder that --out names and ask again"
            notes.append(f"the {name} runs were made in several numeric environments, {said}")
    notes += _on_intervals(len(runs["strict"]))
    return Noise(groups, notes, [plain(line) for line in verdicts], threads)


def _metrics(made: Made) -> dict[str, float]:
    """The final metrics of a run but `steps`, and the last loss that its loop logged."""
    logged = [row["metrics"][LOSS] for row in metric_rows(made.folder) if LOSS in row["metrics"]]
    return {LAST_LOSS: float(logged[-1])} | made.metrics if logged else made.metrics


def _group(project: Project, runs: Sequence[Made], metrics: Sequence[dict[str, float]], names: Sequence[str]) -> Group:
    return Group(
        [each.receipt.name for each in runs],
        [os.path.relpath(each.folder, project.root) for each in runs],
        [each.requested.name for each in runs],
        len({each.bits for each in runs}) == 1,
        {name: spread([each[name] for each in metrics]) for name in names},
        [_apart(runs[0], each) for each in runs[1:]],
    )


def _apart(one: Made, other: Made) -> float:
    equal = one.receipt.weights == other.receipt.weights  # those that hold a NaN, too
    return 0.0 if equal else distance(one.folder / WEIGHTS, other.folder / WEIGHTS)


def spread(values: list[float]) -> Spread:
    """How far values of a metric spread."""
    if not all(abs(value) <= LARGEST for value in values):  # NaN is not, either
        return Spread(values, None, None, None, None)
    numbers = np.array(values, dtype=np.float64)
    within = statistics.deviation_interval(numbers, seed=0)
    low, high = (within.low, within.high) if within else (None, None)
    return Spread(values, statistics.mean(numbers), statistics.pooled_deviation([numbers]), low, high)


def _on_intervals(runs: int) -> Iterator[str]:
    least, *_, enough = COVERAGE
    if runs < least:
        yield f"of fewer than {least} runs an interval is far too short, and of 2 there is none: see --runs"
    elif runs < enough:
        held = ", ".join(f"{cases} % of cases at {count} runs" for count, cases in COVERAGE.items())
        yield f"of few runs an interval is too short: of normal numbers it holds the true deviation in {held}"


def _of_strict(group: Group, runs: Sequence[Made]) -> str:
    if group.equal_bits:
        return f"strict: all {len(runs)} runs have equal bits"
    other = next(count for count, each in enumerate(runs) if each.bits != runs[0].bits)
    return (
        f"DIFFERS: {group.names[0]} and {group.names[other]} have other bits, and the same was asked for: this breaks "
        f"the contract. See where: samebits diff {group.folders[0]} {group.folders[other]}"
    )


def _of_relaxed(group: Group, threads: int) -> str:
    used = f"{len(group.runs)} runs with all flags off and {threads} thread{'s' * (threads > 1)}"
    if group.equal_bits:
        return f"relaxed: this machine shows no non-determinism for this model: {used} have equal bits"
    return f"relaxed: {used} differ in bits"


def verdict(metric: str, relaxed: Spread, seeds: Spread) -> str:
    """The noise of relaxed runs in a metric beside its spread over seeds, in a sentence."""
    said = named(metric)
    for name, each in (("relaxed run", relaxed), ("seed", seeds)):
        if each.deviation is None:
            wrong = [value for value in each.values if not abs(value) <= LARGEST]
            of = f"{len(wrong)} of {len(each.values)} {name}s"
            return f"{said}: it is {wrong[0]!r} in {of}, so it has no spread; find out why"
    noise, over = relaxed.deviation or 0.0, seeds.deviation or 0.0
    if not noise:
        return f"{said}: relaxed runs do not differ, seeds {f'spread {_spread(seeds)}' if over else 'neither'}"
    if not over:
        return f"{said}: relaxed runs spread {_spread(relaxed)}, seeds do not differ: all of it is noise"
    share = noise / over
    return f"{said}: relaxed runs spread {_spread(relaxed)}, seeds {_spread(seeds)}: noise is {100 * share:.3g} % of it"


def _spread(each: Spread) -> str:
    within = "" if each.low is None or each.high is None else f" (95 % {each.low:.2g} … {each.high:.2g})"
    return f"{each.deviation:.2g}{within}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
