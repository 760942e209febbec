"""Orders other than uniform shuffles: each epoch is a function of its key, and holds what its words say."""

from typing import Any

import numpy as np
import pytest

from samebits.core.errors import UserError
from samebits.core.orders import ByLength, Weighted
from samebits.core.plan import Plan

SAMPLES = 1000
PLACES = np.arange(SAMPLES)


def test_weights_decide_how_often_a_sample_comes():
    weights = np.where(PLACES < 100, 9.0, 1.0)
    weights[-50:] = 0
    draws = Weighted(weights)(SAMPLES, 3).items(PLACES)
    assert 480 < (draws < 100).sum() < 570  # 900 of 1750 weights: 514 are expected, with a deviation of 16
    assert draws.max() < SAMPLES - 50 and len(np.unique(draws)) > 400
    (alone,) = set(Weighted([0, 0, 1e-300, 0])(4, 5).items(np.arange(4)).tolist())
    assert alone == 2


def lengths() -> Any:
    return np.random.default_rng(0).integers(1, 100, SAMPLES)


def test_samples_of_one_length_follow_each_other_and_each_comes_once():
    order = ByLength(lengths(), 8)(SAMPLES, 3).items(PLACES)
    assert sorted(order.tolist()) == PLACES.tolist()
    padded = lengths()[order].reshape(-1, 8)
    shuffled = lengths()[PLACES].reshape(-1, 8)
    assert (padded.max(1, keepdims=True) - padded).sum() < 0.1 * (shuffled.max(1, keepdims=True) - shuffled).sum()
    assert np.abs(np.diff(padded.mean(1))).mean() > 20  # the groups are shuffled


@pytest.mark.parametrize("order", [Weighted(np.arange(SAMPLES)), ByLength(lengths(), 7)], ids=["weighted", "by length"])
def test_epochs_differ_and_any_place_of_one_comes_again(order: Any):
    one, other = (order(SAMPLES, key).items(PLACES) for key in (1, 2))
    assert (one != other).mean() > 0.9
    again = order(SAMPLES, 1)
    parts = [again.items(PLACES[place : place + 13]) for place in reversed(range(0, SAMPLES, 13))]
    assert np.array_equal(np.concatenate(parts[::-1]), one)


def test_order_of_the_owner_is_asked_alike_for_one_place_and_for_many():
    plan = Plan(SAMPLES, 64, 8, 5, ByLength(lengths(), 8))
    steps = range(10, 20)  # from the first epoch into the second one
    many = plan.keys_of(steps, range(8))
    assert many == [plan.keys(step, micro_batch) for step in steps for micro_batch in range(8)]
    assert {epoch for keys in many for epoch, *_ in keys} == {0, 1}


class Constant:
    """An order that gives these items whatever is asked."""

    def __init__(self, *items: Any) -> None:
        self._items = np.array(items)

    def __call__(self, samples: int, key: int) -> "Constant":
        return self

    def items(self, positions: Any) -> Any:
        """The same always."""
        return self._items[: len(positions)]


@pytest.mark.parametrize(
    "items", [(SAMPLES,) * 64, (-1,) * 64, (0.5,) * 64, (1, 2)], ids=["above", "below", "half", "few"]
)
def test_items_that_are_no_samples_are_refused(items: Any):
    with pytest.raises(UserError, match=r"run\.steps\(order=\.\.\.\): items\(\) gave .* from 0 to 999 wanted"):
        Plan(SAMPLES, 64, 8, 5, Constant(*items)).keys_of(range(1), range(8))


@pytest.mark.parametrize("weights", [[], [[1.0]], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [float("inf")]])
def test_weights_that_say_nothing_are_refused(weights: Any):
    with pytest.raises(UserError, match=r"samebits\.Weighted: weights of shape .* wanted"):
        Weighted(weights)


@pytest.mark.parametrize("order", [Weighted([1, 2]), ByLength([1, 2], 1)])
def test_one_number_for_each_sample_is_wanted(order: Any):
    with pytest.raises(UserError, match="2 given, 3 wanted, one for each sample of the dataset"):
        order(3, 1)
