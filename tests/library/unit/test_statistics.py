"""The statistics of `samebits compare`: as scipy computes them, and as rarely wrong as they say."""

from typing import Any

import numpy as np
import pytest
import scipy.stats

from samebits.analysis import statistics

LOW, HIGH = [0.9861, 0.9875, 0.9889, 0.9847, 0.9902], [0.9944, 0.9958, 0.9931, 0.9972, 0.9919]


@pytest.mark.parametrize(("of_a", "of_b"), [(3, 3), (5, 5), (4, 7), (6, 2)])
@pytest.mark.parametrize("step", [0, 0.25])  # with 0.25 many sums are tied
def test_exact_p_is_that_of_scipy(of_a: int, of_b: int, step: float):
    rng = np.random.default_rng(of_a)
    for _ in range(5):
        a, b = rng.normal(size=of_a), rng.normal(0.7, size=of_b)
        a, b = (np.round(each / step) * step if step else each for each in (a, b))
        theirs = scipy.stats.permutation_test(
            (a, b), lambda x, y, axis: x.mean(axis) - y.mean(axis), n_resamples=np.inf
        )
        ours = statistics.compare_means(a, b, 0)
        assert ours.exact and ours.p == pytest.approx(theirs.pvalue, rel=1e-12)


def test_sums_that_are_equal_on_paper_are_tied():
    """0.1 + 0.5 and 0.2 + 0.4, which differ as floats."""
    found = statistics.compare_means(np.array([0.1, 0.5, 0.3]), np.array([0.2, 0.4, 0.3]), 0)
    assert found.p == 1


@pytest.mark.parametrize(("alone", "p"), [(5.0, 2 / 6), (4.0, 4 / 6), (2.0, 1.0), (4 + 1e-15, 2 / 6)])
def test_a_group_of_one_has_an_exact_p(alone: float, p: float):
    found = statistics.compare_means(np.array([1.0, 2, 3, 4, 3]), np.array([alone]), 0)
    assert found == statistics.Tested(pytest.approx(p), 6, True, 2 / 6)


def test_drawn_p_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch):
    a = np.array(LOW + HIGH)  # of ten against ten there are more partitions than are drawn
    b = a + 0.002
    exact = statistics.compare_means(a, b, 0)
    monkeypatch.setattr(statistics, "EXACT", 1)
    drawn = statistics.compare_means(a, b, 0)
    assert (exact.exact, drawn.exact, drawn.partitions) == (True, False, statistics.DRAWN)
    assert abs(drawn.p - exact.p) < 4 * 2 * (exact.p / 2 / statistics.DRAWN) ** 0.5 and drawn.p != exact.p
    assert statistics.compare_means(a[::-1], b[::-1], 0) == drawn
    assert drawn.least == 2 / (statistics.DRAWN + 1)


@pytest.mark.parametrize(
    ("ours", "groups", "theirs"),
    [
        (statistics.interval, (LOW, HIGH), lambda x, y, axis: y.mean(axis) - x.mean(axis)),
        (statistics.deviation_interval, (LOW,), lambda x, axis: x.std(axis, ddof=1)),
    ],
)
def test_interval_is_that_of_scipy_in_any_order(ours: Any, groups: tuple[list[float], ...], theirs: Any):
    ordered = tuple(map(np.sort, groups))
    wanted = scipy.stats.bootstrap(ordered, theirs, method="BCa", rng=np.random.default_rng(7)).confidence_interval
    found = ours(*map(np.array, groups), 7)
    assert found.method == "BCa" and (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-9)
    assert ours(*(np.array(group[::-1]) for group in groups), 7) == found


def test_interval_is_one_of_percentiles_where_bca_is_degenerate():
    found = statistics.interval(np.array([0, 1e-20]), np.array([1e10, 1e10]), 0)
    assert found == statistics.Interval(1e10, 1e10, "percentile")
    assert statistics.interval(np.array([1.0, 1]), np.array([2.0, 2]), 0) is None


def test_numbers_of_any_size_have_a_deviation_and_intervals():
    for size in (1e-300, 1e-160, 1e160, 1e299):
        a, b = np.array(LOW) * size, np.array(HIGH) * size
        deviation, within = statistics.pooled_deviation((a, b)), statistics.interval(a, b, 0)
        assert deviation == pytest.approx(size * statistics.pooled_deviation((np.array(LOW), np.array(HIGH))), rel=1e-9)
        assert within and within.method == "BCa" and 0 < within.low < within.high < np.inf
        assert statistics.compare_means(a, b, 0).p == pytest.approx(2 / 252)
        of_deviation = statistics.deviation_interval(a, 0)
        assert of_deviation and 0 < of_deviation.low < of_deviation.high < np.inf


@pytest.mark.parametrize("test", [statistics.compare_means, statistics.compare_spreads])
def test_false_alarms_are_as_rare_as_the_level_says(test: Any):
    draws, rng = 500, np.random.default_rng(0)
    alarms = sum(test(rng.normal(size=5), rng.normal(size=5), 0).p <= 0.05 for _ in range(draws))
    assert 0 < alarms <= draws * (0.05 + 3 * (0.05 * 0.95 / draws) ** 0.5)


def test_runs_that_are_advised_have_the_power_that_is_stated():
    rng, effect, draws = np.random.default_rng(0), 1.9, 200
    count = statistics.runs_for_power(effect, 0.05)
    assert count == 6
    found = sum(
        statistics.compare_means(rng.normal(size=count), rng.normal(effect, size=count), 0).p <= 0.05
        for _ in range(draws)
    )
    assert 0.72 < found / draws < 0.88


def test_fewest_runs_that_can_decide():
    assert [statistics.fewest_that_decide(level) for level in (1, 0.1, 0.05, 0.025, 0.001)] == [1, 3, 4, 5, 7]


def test_p_values_are_adjusted_as_holm_does():
    assert statistics.adjusted([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.adjusted([0.9, 0.8]) == [1, 1] and statistics.adjusted([]) == []


# ---- the deviation of one group


def test_deviation_is_that_of_scipy():
    assert statistics.pooled_deviation([np.array(LOW)]) == pytest.approx(scipy.stats.tstd(LOW), rel=1e-12)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [3.0] * 5])
def test_too_few_or_equal_numbers_have_no_interval_of_the_deviation(values: list[float]):
    assert statistics.deviation_interval(np.array(values), 0) is None


@pytest.mark.parametrize(("count", "stated"), [(5, 0.65), (10, 0.82), (20, 0.89)])
def test_interval_of_the_deviation_holds_the_true_one_as_often_as_is_stated(
    count: int, stated: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    rng, draws = np.random.default_rng(1), 150
    found = [statistics.deviation_interval(rng.normal(5, 2, count), number) for number in range(draws)]
    held = sum(each is not None and each.low <= 2 <= each.high for each in found)
    assert abs(held / draws - stated) < 3 * (stated * (1 - stated) / draws) ** 0.5
