"""The keyed permutation: bijective for any n, evenly spread, and any position at once."""

import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable

import pytest
from project.repro.order import Permutation, mix

SIZES = [1, 2, 3, 4, 5, 6, 7, 10, 100, 1000, 1438, *(2**k + d for k in (3, 6, 7, 11) for d in (-1, 0, 1))]
FAR = 10**10

KNOWN = {
    (1, 0): [0],
    (2, 0): [1, 0],
    (3, 0): [2, 0, 1],
    (10, 0): [2, 3, 9, 5, 4, 1, 8, 7, 0, 6],
    (10, 1): [1, 9, 0, 5, 2, 6, 4, 3, 8, 7],
    (10, 2**64 - 1): [0, 8, 7, 1, 5, 2, 9, 4, 3, 6],
}


def order(n: int, key: int) -> list[int]:
    permutation = Permutation(n, key)
    return [permutation[position] for position in range(n)]


@pytest.mark.parametrize("n", SIZES)
def test_every_item_has_one_position(n: int):
    for key in (0, 1, 2**64 - 1):
        assert sorted(order(n, key)) == list(range(n))


@pytest.mark.parametrize(("n", "key"), KNOWN)
def test_orders_are_the_known_ones(n: int, key: int):
    assert order(n, key) == KNOWN[n, key]


def test_far_positions_are_the_known_ones():
    permutation = Permutation(FAR, 7)
    assert [permutation[i] for i in (0, 1, FAR - 1)] == [7227481274, 4457441434, 7706414843]


def test_length_is_n():
    assert len(Permutation(1438, 0)) == 1438


def test_keys_give_different_orders():
    assert len({tuple(order(100, key)) for key in range(200)}) == 200


def uneven(drawn: Iterable[object], cells: int) -> bool:
    """Whether a chi-square test calls the draws uneven over `cells` cells.

    For even draws the statistic has mean c-1 and variance 2(c-1); five standard deviations are allowed.
    The keys of the tests are fixed, so that a test passes always or never.
    """
    counts = Counter(drawn)
    expected = counts.total() / cells
    unseen = (cells - len(counts)) * expected
    statistic = sum((count - expected) ** 2 / expected for count in counts.values()) + unseen
    return statistic > cells - 1 + 5 * math.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("n", [2, 3, 5, 10, 17, 100])
def test_first_position_is_even_over_keys(n: int):
    assert not uneven((Permutation(n, key)[0] for key in range(5000)), n)
    assert not uneven((Permutation(n, mix(key))[n - 1] for key in range(5000)), n)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_items_are_equally_likely(n: int):
    assert not uneven((tuple(order(n, key)) for key in range(5000)), math.factorial(n))


def test_uneven_draws_are_found():
    assert uneven((mix(key) % 16 % 10 for key in range(5000)), 10)  # 0 to 5 twice as often
    assert uneven(((key & 1, 1 - (key & 1), 2) for key in range(5000)), 6)  # two of the six orders of 3


@pytest.mark.parametrize("n", SIZES)
def test_positions_outside_are_refused(n: int):
    for position in (-1, n, n + 1):
        with pytest.raises(IndexError, match=rf"position {position} is outside \[0, {n}\)"):
            Permutation(n, 0)[position]


def test_iterating_ends():
    assert list(Permutation(10, 1)) == KNOWN[10, 1]


@pytest.mark.parametrize("n", [0, -3])
def test_no_items_are_refused(n: int):
    with pytest.raises(ValueError, match=f"a permutation of {n} items: wanted at least 1"):
        Permutation(n, 0)


@pytest.mark.parametrize("n", [n for n in SIZES if n > 2])  # 1 and 2 lie in a range of 4
def test_fewer_than_two_walks_are_needed_on_average(n: int, monkeypatch: pytest.MonkeyPatch):
    encrypt, walked = Permutation._encrypt, []

    def counting(self: Permutation, word: int) -> int:
        walked.append(word)
        return encrypt(self, word)

    monkeypatch.setattr(Permutation, "_encrypt", counting)
    order(n, 0)
    assert n <= len(walked) < 2 * n


def test_any_position_costs_microseconds_and_no_memory():
    positions = range(0, FAR, FAR // 1000)
    tracemalloc.start()
    permutation = Permutation(FAR, 7)
    reached = sum(permutation[position] >= 0 for position in positions)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reached == len(positions) and peak < 10_000

    def once() -> float:
        began = time.perf_counter()
        for position in positions:
            permutation[position]
        return (time.perf_counter() - began) / len(positions)

    assert min(once() for _ in range(5)) < 500e-6  # about 10 us on an idle machine; a list would take hours
