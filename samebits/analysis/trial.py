"""`samebits trial`: may a change of the config become the default? Pairs of runs with and without it, judged by ranges.

Each pair shares a seed, so that the draw of the weights and of the order is no part of the difference. The change may
become the default if each interval lies in the range that results.lock gives. One criterion that fails is enough to
refuse, so all of them together keep the level of one (an intersection-union test: Berger 1982).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from ..base.files import durable, exact
from ..base.forms import Form
from ..base.project import Project
from ..base.shape import plain
from ..config.params import load
from ..config.yaml_file import read_yaml
from ..core.errors import UserError
from ..record.code_state import code_state
from . import statistics
from .cost import step_seconds
from .groups import named
from .results import RESULTS, lock
from .series import Made, Requested, Series
from .table import table

Range = tuple[float | None, float | None]  # from, to; None is no bound
HOLDS, FAILS, UNDECIDED = "holds", "FAILS", "undecided"
SHEET = "trials.yaml"
EXAMPLE = "trial: {same_bits: false, seconds: [null, 1.05], memory: [null, 1.05], metrics: {accuracy: [-0.01, null]}}"
HEAD = ("criterion", "without", "with", "change", "interval", "range", "verdict")


class Entry(Form):
    """A trial on the sheet."""

    verdict: str


@dataclass(frozen=True)
class Criterion:
    """One thing that a change must not make worse.

    Attributes:
        without, with_it: the mean of a metric, or the median of time (seconds per step) or memory (bytes).
        change: of a metric the mean difference within pairs, of time and memory the median ratio.
        low, high: a 95 % interval of it.
        range: within which that must lie; None is no bound.
    """

    name: str
    without: float
    with_it: float
    change: float
    low: float | None
    high: float | None
    range: Range

    @property
    def verdict(self) -> str:
        """Whether the interval lies in the range."""
        least, most = self.range
        least, most = -math.inf if least is None else least, math.inf if most is None else most
        if not math.isfinite(self.change):
            return FAILS
        if self.low is None or self.high is None:
            return UNDECIDED
        if self.high < least or self.low > most:
            return FAILS
        return HOLDS if least <= self.low and self.high <= most else UNDECIDED


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial.

    Attributes:
        change: the overrides that were tried.
        pairs, equal: how many pairs there are, and how many of them have equal bits.
        same_bits: whether all have to have them.
        spreads: metric -> p-value of the test whether the runs with the change spread more or less than those without.
        wider: the metrics that spread more.
        receipts: of the runs without the change, and with it.
    """

    change: list[str]
    pairs: int
    equal: int
    same_bits: bool
    criteria: list[Criterion]
    spreads: Mapping[str, float]
    wider: list[str]
    receipts: Mapping[str, list[str]]

    @property
    def verdict(self) -> str:
        """The overall verdict."""
        seen = {each.verdict for each in self.criteria}
        if FAILS in seen or self.wider or (self.same_bits and self.equal < self.pairs):
            return FAILS
        return UNDECIDED if UNDECIDED in seen else HOLDS

    def record(self) -> dict[str, Any]:
        """As JSON and the sheet have it."""
        rows = [{**asdict(each), "range": list(each.range), "verdict": each.verdict} for each in self.criteria]
        return exact({"verdict": self.verdict} | asdict(self) | {"criteria": rows})


@dataclass(frozen=True)
class Ranges:
    """The part `trial` of results.lock."""

    same_bits: bool
    seconds: Range
    memory: Range
    metrics: Mapping[str, Range]


def ranges(project: Project) -> Ranges:
    """The ranges that the project sets.

    Raises:
        UserError: results.lock has none, or a range is not two ends in order.
    """
    if not (held := lock(project).get("trial")):
        raise UserError(f"{RESULTS}: no `trial` seen, ranges for a new default wanted, such as\n  {EXAMPLE}")
    metrics = {name: _range(name, ends) for name, ends in held["metrics"].items()}
    time, memory = (_range(name, held[name]) for name in ("seconds", "memory"))
    return Ranges(held["same_bits"], time, memory, metrics)


def _range(name: str, ends: Sequence[float | None]) -> Range:
    if len(ends) == 2:
        low, high = ends
        if low is None or high is None or low <= high:
            return low, high
    raise UserError(f"{RESULTS}: trial: {named(name)}: {ends} seen, [LOW, HIGH] wanted; null is no bound")


def tried(series: Series, change: Sequence[str], pairs: int) -> Trial:
    """Make pairs of trainings without the change and with it, by turns, and judge them.

    Raises:
        UserError: the change is none, or does not fit; results.lock has no ranges, or names a metric that no run has.
    """
    judged, without = ranges(series.project), load(series.schema, overrides=series.overrides)
    changed = load(series.schema, overrides=(*series.overrides, *change)).flat()
    settings = {key: changed[key] for key in (text.partition("=")[0] for text in change)}
    if changed == without.flat():
        raise UserError(f"{plain(' '.join(change))}: the project has this already; give KEY=VALUE with another value")
    if "seed" in settings:
        raise UserError("seed: each pair has a seed of its own; give another key")
    wanted = []
    for pair in range(pairs):
        seed = {"seed": without.seed + pair}
        both = [
            Requested(f"seed {seed['seed']}", seed),
            Requested(f"seed {seed['seed']}, changed", {**settings, **seed}),
        ]
        wanted += both if pair % 2 == 0 else both[::-1]
    made = list(series.make(wanted))
    sides = [[each for each in made if each.requested.name.endswith("changed") == with_it] for with_it in (False, True)]
    return judge(sides[0], sides[1], change, judged)


def judge(without: Sequence[Made], with_it: Sequence[Made], change: Sequence[str], judged: Ranges) -> Trial:
    """Compare the trainings of each pair."""
    have = sorted({*without[0].metrics} & {*with_it[0].metrics})
    if missing := [name for name in judged.metrics if name not in have]:
        seen = ", ".join(map(named, have))
        raise UserError(f"{RESULTS}: trial: metrics: {named(missing[0])}: no run has it; they have: {seen}")
    criteria, spreads, wider = [], {}, []
    for name, within in judged.metrics.items():
        one, other = (np.array([run.metrics[name] for run in side]) for side in (without, with_it))
        criteria.append(_of_metric(name, one, other, within))
        if len(one) > 1 and np.isfinite([one, other]).all() and (np.ptp(one) or np.ptp(other)):
            spreads[name] = statistics.compare_spreads(one, other, 0).p
            grown = np.mean(statistics.distances(other)) > np.mean(statistics.distances(one))
            wider += [name] if grown and spreads[name] <= statistics.LEVEL else []
    for name, of, within in (
        ("seconds", step_seconds, judged.seconds),
        ("memory", methodcaller("memory"), judged.memory),
    ):
        one, other = (np.array([of(run) for run in side], float) for side in (without, with_it))
        low, high = statistics.median_interval(other / one) or (None, None)
        medians = float(np.median(one)), float(np.median(other)), float(np.median(other / one))
        criteria.append(Criterion(name, *medians, low, high, within))
    receipts = {"without": [run.receipt.name for run in without], "with": [run.receipt.name for run in with_it]}
    equal = sum(one.bits == other.bits for one, other in zip(without, with_it, strict=True))
    return Trial([*change], len(without), equal, judged.same_bits, criteria, spreads, wider, receipts)


def _of_metric(name: str, one: statistics.Numbers, other: statistics.Numbers, within: Range) -> Criterion:
    if not np.isfinite([one, other]).all():
        return Criterion(name, float(one.mean()), float(other.mean()), math.nan, None, None, within)
    low, high = statistics.mean_interval(other - one) or (None, None)
    means = statistics.mean(one), statistics.mean(other), statistics.mean(other - one)
    return Criterion(name, *means, low, high, within)


def lines(trial: Trial) -> list[str]:
    """The table and the verdict."""
    cells = [
        [
            named(each.name),
            f"{each.without:.4g}",
            f"{each.with_it:.4g}",
            f"{each.change:.4g}",
            "none" if each.low is None or each.high is None else f"{each.low:.4g} … {each.high:.4g}",
            " … ".join("" if end is None else f"{end:g}" for end in each.range),
            each.verdict,
        ]
        for each in trial.criteria
    ]
    wanted = "" if trial.equal == trial.pairs or not trial.same_bits else ": FAILS, all wanted"
    found = [*table(HEAD, cells), f"bits: equal in {trial.equal} of {trial.pairs} pairs{wanted}"]
    for name, p in trial.spreads.items():
        word = "FAILS, with the change it is wider" if name in trial.wider else "not shown to be wider"
        found.append(f"spread of {named(name)}: p = {p:.3g}: {word}")
    change, open_ = plain(" ".join(trial.change)), [each for each in trial.criteria if each.verdict == UNDECIDED]
    if trial.verdict == UNDECIDED:
        names = ", ".join(named(each.name) for each in open_)
        return [*found, f"undecided: {change}: the interval of {names} crosses its range: give more --pairs"]
    word = "may become the default" if trial.verdict == HOLDS else "may not become the default"
    return [*found, f"{change} {word}"]


def enter(project: Project, trial: Trial) -> str:
    """Append the trial to the sheet of all trials, and return what was done in a sentence."""
    path = project.root / SHEET
    sheet = read_yaml(path, list[Entry], f"Restore it with: git checkout {SHEET}") if path.is_file() else []
    yaml = YAML()
    yaml.width = 1000
    entry = {"commit": code_state(project)[0]["commit"]} | trial.record()
    with durable(path) as beside, beside.open("w") as file:
        yaml.dump([*sheet, entry], file)
    return f"{SHEET}: entry {len(sheet) + 1} is written; commit it"
