"""Statistics of groups of numbers: pure functions, which give equal numbers the same result in any order."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]

LEVEL = 0.05  # of all tests: how often they may find a difference where there is none
POWER = 0.8  # how often the runs that are advised find a difference that is there
EXACT = 200_000  # at most so many partitions are all tried: 10 against 10 have 184,756
DRAWN = 99_999  # of more, so many are drawn
RESAMPLES = 9_999
BLOCK = 2**22  # numbers held at a time
MOST = 10_000_000  # no more runs than that are advised


@dataclass(frozen=True)
class Tested:
    """The outcome of a permutation test.

    Attributes:
        p: two-sided p-value.
        partitions: how many partitions of the runs were looked at.
        exact: whether these are all there are.
        least: the smallest p-value that groups of these sizes can have.
    """

    p: float
    partitions: int
    exact: bool
    least: float


@dataclass(frozen=True)
class Interval:
    """A 95 % interval, and the kind of bootstrap that made it."""

    low: float
    high: float
    method: str


def mean(values: Numbers) -> float:
    """The mean, rounded once for any order; that of equal numbers is that number."""
    low = float(values.min())
    return low + math.fsum((values - low).tolist()) / len(values)


def pooled_deviation(groups: Sequence[Numbers]) -> float | None:
    """The standard deviation within groups, each around its own mean: the square root of Student's pooled variance.

    None where no group has two numbers.
    """
    within = np.concatenate([np.sort(group) - mean(group) for group in groups]) if groups else np.zeros(0)
    freedom, largest = len(within) - len(groups), float(np.abs(within).max(initial=0))
    if not freedom:
        return None
    # in units of the largest, so that no square overflows or vanishes
    return largest * math.sqrt(math.fsum(((within / largest) ** 2).tolist()) / freedom) if largest else 0.0


def distances(values: Numbers) -> Numbers:
    """How far numbers lie from their median (Brown and Forsythe 1974), without the smallest of these distances.

    The median has taken that one: of an odd group it is zero always, of an even group it is there twice. Hines and
    Hines (2000) show what such structural zeros cost. So there is one distance less than there are numbers.
    """
    return np.sort(np.abs(values - np.median(values)))[1:]


def compare_means(a: Numbers, b: Numbers, seed: int) -> Tested:
    """Permutation test of the difference of means (Fisher 1935; Pitman 1937).

    Exact where all partitions are tried, else by Monte Carlo. It is at its level for any distribution, as long as
    the groups differ in nothing but their names if there is no difference.
    """
    both = np.unique([*a, *b])
    finest = float(np.diff(both).min(initial=np.inf)) / 4  # tied sums are to be one, different runs are not
    return _permuted(a, b, min(_rounding(a, b), finest), seed)


def compare_spreads(a: Numbers, b: Numbers, seed: int) -> Tested:
    """Permutation test of the log of the ratio of the mean distances from each group's median; see `distances`.

    With the sum of all distances given, this ratio grows with the mean of one group, so the test is that of the
    difference of means. It is an approximation, for the distances in a group depend on each other: at level 0.05 false
    alarms were measured to be at most 0.05 of normal, uniform and t(3) numbers, and 0.08 of exponential ones.
    """
    return _permuted(distances(a), distances(b), _rounding(a, b), seed)


def _rounding(a: Numbers, b: Numbers) -> float:
    """By how much sums of the smaller group that are equal on paper can differ by rounding."""
    return min(len(a), len(b)) * float(np.finfo(float).eps * max(np.abs(a).max(), np.abs(b).max()))


def _permuted(a: Numbers, b: Numbers, tolerance: float, seed: int) -> Tested:
    """Two-sided permutation test of the difference of means by scipy.stats.permutation_test.

    p is twice the smaller tail; each tail is (count + 1) / (drawn + 1) where partitions are drawn (Phipson and Smyth
    2010).
    """
    small, large = sorted((a, b), key=len)
    count = math.comb(len(a) + len(b), len(small))
    exact = count <= EXACT
    both, unit = _in_units(np.concatenate([np.sort(small), np.sort(large)]))
    one, other, tolerance = both[: len(small)], both[len(small) :], tolerance / unit
    seen = one.sum()

    def beyond(chosen: Numbers, _: Numbers, axis: int) -> Any:
        over = chosen.sum(axis=axis) - seen
        return np.where(np.abs(over) <= tolerance, 0.0, over)  # scipy's own tolerance is relative: none around 0

    if len(small) == 1:  # scipy wants two; a partition is one of the numbers
        over = beyond(both[:, None], both, 1)
        p = min(1.0, 2 * min((over <= 0).mean(), (over >= 0).mean()))
    else:
        from scipy.stats import permutation_test  # takes most of a second to import

        p = permutation_test(
            (one, other),
            beyond,
            n_resamples=count if exact else DRAWN,
            batch=max(1, BLOCK // len(both)),
            vectorized=True,
            rng=np.random.default_rng(seed),
        ).pvalue
    partitions, own = (count, 0) if exact else (DRAWN, 1)
    return Tested(float(p), partitions, exact, min(1.0, 2 / (partitions + own)))


def _in_units(values: Numbers) -> tuple[Numbers, float]:
    """Numbers around zero in a unit, a power of two, in which none is beyond 1; and this unit."""
    around = values - np.median(values)
    unit = 2.0 ** math.frexp(float(np.abs(around).max()))[1]
    return around / unit, unit


def interval(a: Numbers, b: Numbers, seed: int) -> Interval | None:
    """A 95 % bootstrap interval of the mean of b less that of a.

    BCa (Efron 1987), or the percentiles where that is degenerate. None where a group has one number, which shows
    no spread, or where neither group has any. Of few numbers it is too short: of normal ones it was measured to hold
    the difference in 79 % of cases at 3 against 3, 87 % at 5 against 5, 92 % at 10 against 10.
    """
    if min(len(a), len(b)) < 2 or not (np.ptp(a) or np.ptp(b)):
        return None
    both, unit = _in_units(np.concatenate([np.sort(a), np.sort(b)]))
    return _bootstrapped((both[: len(a)], both[len(a) :]), _difference, unit, seed)


def deviation_interval(values: Numbers, seed: int) -> Interval | None:
    """A 95 % bootstrap interval of the standard deviation.

    BCa, or the percentiles where that is degenerate. None where there are fewer than three numbers, or where they are
    all equal. Of few numbers it is too short: of normal ones it was measured to hold the true deviation in 65 % of
    cases at 5 numbers, 82 % at 10, 89 % at 20; where it misses, it lies too low as a rule.
    """
    if len(values) < 3 or not np.ptp(values):
        return None
    around, unit = _in_units(np.sort(values))
    return _bootstrapped((around,), _deviation, unit, seed)


def _bootstrapped(samples: tuple[Numbers, ...], statistic: Any, unit: float, seed: int) -> Interval | None:
    """The interval of a statistic of samples that are in a unit; None where no kind of bootstrap gives one."""
    from scipy.stats import bootstrap  # takes most of a second to import

    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # what is degenerate ends as NaN
            low, high = bootstrap(
                samples,
                statistic,
                n_resamples=RESAMPLES,
                batch=max(1, BLOCK // sum(map(len, samples))),
                confidence_level=0.95,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        if math.isfinite(low) and math.isfinite(high):
            return Interval(float(low) * unit, float(high) * unit, method)
    return None


def _deviation(values: Numbers, axis: int) -> Any:
    return values.std(axis=axis, ddof=1)


def _difference(a: Numbers, b: Numbers, axis: int) -> Any:
    return b.mean(axis=axis) - a.mean(axis=axis)


def mean_interval(values: Numbers, level: float = LEVEL) -> tuple[float, float] | None:
    """Student's interval of a mean: exact for normal numbers. Of equal numbers it is their value; None for one number.

    Raises:
        FloatingPointError: a number is not finite.
    """
    if not np.isfinite(values).all():
        raise FloatingPointError("a number that is not finite")
    middle, deviation = mean(values), pooled_deviation([values])
    if deviation is None:
        return None
    from scipy.stats import t  # takes most of a second to import

    half = float(t.isf(level / 2, len(values) - 1)) * deviation / math.sqrt(len(values)) if deviation else 0.0
    return middle - half, middle + half


def median_interval(values: Numbers, level: float = LEVEL) -> tuple[float, float] | None:
    """An interval that holds the median of any distribution with a chance of 1 - `level` at least.

    Its ends are order statistics (Thompson 1936): the median lies beyond the r-th number from either end with the
    binomial chance of fewer than r heads in as many tosses as there are numbers. None where there are too few.
    """
    count, tail, outside = len(values), 0.0, 0
    while outside < count / 2 and (tail := tail + math.comb(count, outside) / 2**count) <= level / 2:
        outside += 1
    ordered = np.sort(values)
    return (float(ordered[outside - 1]), float(ordered[-outside])) if outside else None


def adjusted(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests, so that all together keep the level of one (Holm 1979)."""
    order, largest, found = sorted(range(len(p_values)), key=p_values.__getitem__), 0.0, dict[int, float]()
    for rank, number in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[number]))
        found[number] = largest
    return [found[number] for number in range(len(p_values))]


def fewest_that_decide(level: float, lost: int = 0) -> int:
    """The fewest runs per group that can reach a p-value of `level`; the test does not count `lost` of each group."""
    count = 1
    while 2 / math.comb(2 * count, count) > level:
        count += 1
    return count + lost


def runs_for_power(effect: float, level: float) -> int | None:
    """How many runs per group show a difference of so many standard deviations with power 0.8.

    The normal approximation to the t-test, n = 2 (z(1 - level/2) + z(power))^2 / effect^2 + z(1 - level/2)^2 / 4
    (Guenther 1981). None where that is more than MOST.
    """
    z, power = (NormalDist().inv_cdf(share) for share in (1 - level / 2, POWER))
    if abs(effect) < math.sqrt(2 / MOST) * (z + power):
        return None
    return math.ceil(2 * ((z + power) / effect) ** 2 + z**2 / 4)
