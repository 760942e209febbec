"""Two groups of runs compared: whether they differ by more than the noise between runs."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.shape import plain
from ..base.text import some
from ..record.view import RunView
from . import statistics
from .groups import chosen, named, notes, require_different, values
from .statistics import LEVEL, Interval, Numbers, Tested

FEW = 10  # runs of a group: a bootstrap interval of fewer is clearly too short


@dataclass(frozen=True)
class Size:
    """The difference of means, B less A, and what it is measured by.

    Attributes:
        deviation: between the runs of a group, pooled over both.
        effect: the difference in such deviations.
        noise_floor: the deviation between runs of one content address, where a group has several of one.
    """

    difference: float
    interval: Interval | None
    deviation: float | None
    effect: float | None
    noise_floor: float | None


@dataclass(frozen=True)
class Verdict(Tested):
    """What a permutation test says, and what it could have said.

    Attributes:
        word: the verdict in a word or two.
        adjusted: the p-value adjusted for all metrics; it decides.
        runs_wanted: where these runs do not decide, so many per group would, if that is known.
    """

    word: str
    adjusted: float
    runs_wanted: int | None
    sentence: str


@dataclass(frozen=True)
class Compared:
    """A metric of both groups; `distances` are the mean distances of runs from the median of their group."""

    metric: str
    values: dict[str, list[float]]
    means: dict[str, float]
    size: Size
    distances: dict[str, float | None]
    of_means: Verdict
    of_spreads: Verdict | None


@dataclass(frozen=True)
class Facts:
    """All that is said about two groups of runs: `runs` are the receipts of each by the names of the runs."""

    runs: dict[str, dict[str, str]]
    level: float
    seed: int
    notes: list[str]
    compared: list[Compared]


def compare(a: Sequence[RunView], b: Sequence[RunView], metrics: Sequence[str], seed: int) -> Facts:
    """Compare the metrics of two groups of runs; of no `metrics`, all that both have but `steps`.

    `seed` is that of partitions and resamples that are drawn.

    Raises:
        UserError: a run is given twice, or has no such metric, or one that is no finite number.
    """
    require_different([*a, *b])
    names, left = chosen(a, b, metrics)
    pairs = {name: (values(a, name), values(b, name)) for name in names}
    means = {name: statistics.compare_means(*pair, seed) for name, pair in pairs.items()}
    spreads = {
        name: statistics.compare_spreads(*pair, seed)
        for name, pair in pairs.items()
        if min(map(len, pair)) > 1 and any(map(np.ptp, pair))
    }
    of_spreads = {name: _of_spreads(name, pairs[name], spreads, p) for name, p in _adjusted(spreads).items()}
    compared = []
    for name, p in _adjusted(means).items():
        pair, size = pairs[name], _size((a, b), pairs[name], seed)
        compared.append(
            Compared(
                name,
                _by_group(*(group.tolist() for group in pair)),
                _by_group(*map(statistics.mean, pair)),
                size,
                _by_group(*map(_distance, pair)),
                _of_means(name, pair, size, means, p),
                of_spreads.get(name),
            )
        )
    remarks = [
        *notes(a, b),
        *([f"{some([*map(named, left)])}: not compared, as one group alone has it"] if left else []),
    ]
    if any(each.size.interval for each in compared) and min(len(a), len(b)) < FEW:
        remarks.append(f"of fewer than {FEW} runs in a group, an interval comes out too short: go by p")
    runs = _by_group(*({run.name: run.required.name for run in group} for group in (a, b)))
    return Facts(runs, LEVEL, seed, remarks, compared)


def lines(facts: Facts) -> list[str]:
    """The facts in sentences: a line of each."""
    found = ["; ".join(f"{name}: {_runs(len(group))}" for name, group in facts.runs.items()), *facts.notes]
    for each in facts.compared:
        found += [verdict.sentence for verdict in (each.of_means, each.of_spreads) if verdict]
    return [plain(line) for line in found]


def _by_group(a: Any, b: Any) -> dict[str, Any]:
    return {"A": a, "B": b}


def _adjusted(tests: Mapping[str, Tested]) -> dict[str, float]:
    return dict(zip(tests, statistics.adjusted([test.p for test in tests.values()]), strict=True))


def _distance(values: Numbers) -> float | None:
    return statistics.mean(statistics.distances(values)) if len(values) > 1 else None


def _size(groups: Sequence[Sequence[RunView]], pair: tuple[Numbers, Numbers], seed: int) -> Size:
    a, b = map(statistics.mean, pair)
    deviation = statistics.pooled_deviation(pair)
    effect = (b - a) / deviation if deviation else math.nan
    known = effect if math.isfinite(effect) else None
    return Size(b - a, statistics.interval(*pair, seed), deviation, known, _noise_floor(groups, pair))


def _noise_floor(groups: Sequence[Sequence[RunView]], values: Sequence[Numbers]) -> float | None:
    """The deviation between runs of one content address, pooled; None where no group has two of one."""
    cells = []
    for runs, numbers in zip(groups, values, strict=True):
        for address, count in Counter(run.address["address"] for run in runs).items():
            if count > 1:
                cells.append(numbers[[run.address["address"] == address for run in runs]])
    return statistics.pooled_deviation(cells)


def _of_means(metric: str, pair: tuple[Numbers, Numbers], size: Size, tests: Mapping[str, Tested], p: float) -> Verdict:
    """The verdict on the difference of means."""
    test, of, wanted = tests[metric], len(tests), None
    said, spread = f"{named(metric)}: {_difference(size)}; {_tested(test, p, of)}: ", any(map(np.ptp, pair))
    if not spread and not size.difference:
        count, value, word = sum(map(len, pair)), float(pair[0][0]), "equal bits"
        said = f"{named(metric)}: all {count} values are {value!r}: equal bits, and no noise to compare with."
    elif not spread and min(map(len, pair)) > 1:
        word = "no noise"
        said += "no group has any spread, so there is no noise here, and the difference is not noise."
    elif p <= LEVEL:
        word = "more than noise"
        said += f"{word}."
    elif of * test.least > LEVEL:
        word, wanted = "undecided", statistics.fewest_that_decide(LEVEL / of)
        said += _too_few(of, wanted)
    else:
        word, wanted = "not shown", statistics.runs_for_power(size.effect, LEVEL / of) if size.effect else None
        said += "not shown to be more than noise."
        if wanted:
            # where so many were not enough, the approximation is too bold
            wanted = max(wanted, *(len(group) + 1 for group in pair))
            said += f" About {wanted:,} runs per group would show a difference of this size in 8 of 10 comparisons"
            said += " (normal approximation)."
    return Verdict(**vars(test), word=word, adjusted=p, runs_wanted=wanted, sentence=said)


def _of_spreads(metric: str, pair: tuple[Numbers, Numbers], tests: Mapping[str, Tested], p: float) -> Verdict:
    """The verdict on how far the runs of each group spread."""
    test, of, wanted = tests[metric], len(tests), None
    one, other = (statistics.mean(statistics.distances(group)) for group in pair)
    said = f"{named(metric)}, spread: {one:#.3g} in A, {other:#.3g} in B (mean distance from the group's median); "
    said += f"{_tested(test, p, of)}: "
    if p <= LEVEL:
        word = "more" if other > one else "less"
        said += f"B spreads {word}."
    elif of * test.least > LEVEL:
        word, wanted = "undecided", statistics.fewest_that_decide(LEVEL / of, lost=1)
        said += _too_few(of, wanted)
    else:
        word = "not shown"
        said += "not shown to be another spread."
    return Verdict(**vars(test), word=word, adjusted=p, runs_wanted=wanted, sentence=said)


def _difference(size: Size) -> str:
    """The difference in words, with what there is to measure it by."""
    if not size.difference:
        return "A and B have the same mean"
    sign, within = (1 if size.difference > 0 else -1), size.interval
    said = f"B is {'higher' if sign > 0 else 'lower'} by {abs(size.difference):#.3g}"
    if within:
        low, high = sorted((sign * within.low, sign * within.high))
        said += f" (95 % interval {low:#.3g} … {high:#.3g})"
    if size.effect is None:
        return said
    times, floor = f"{abs(size.effect):.2g} times the ", size.noise_floor
    if floor is None:
        return f"{said}, {times}deviation between runs"
    if floor == size.deviation:
        return f"{said}, {times}noise floor, the deviation between runs of one content address"
    said += f", {times}deviation between runs"
    if not floor:
        return f"{said} (runs of one content address are equal)"
    return f"{said} and {abs(size.difference) / floor:.2g} times the noise floor, that of runs of one content address"


def _tested(test: Tested, p: float, of: int) -> str:
    adjusted = f" ({p:.3g} adjusted for {of} metrics)" if of > 1 else ""
    tried = f"exact over {test.partitions:,}" if test.exact else f"over {test.partitions:,} random"
    return f"permutation test p = {test.p:.3g}{adjusted}, {tried} partitions"


def _too_few(of: int, wanted: int) -> str:
    metrics = f" of {of} metrics" if of > 1 else ""
    return f"undecided, for no test{metrics} can decide with so few runs; {wanted} per group could."


def _runs(count: int) -> str:
    return f"{count} run{'s' if count > 1 else ''}"
