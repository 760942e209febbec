"""The keyed permutation: bijective for any n, evenly spread, and any position at once."""

import itertools
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from samebits.core.order import MASK, Permutation, mix

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
    assert order(n, key) == list(Permutation(n, key)) == KNOWN[n, key] and len(Permutation(n, key)) == n


def test_far_positions_are_the_known_ones():
    permutation = Permutation(FAR, 7)
    assert [permutation[i] for i in (0, 1, FAR - 1)] == [7227481274, 4457441434, 7706414843]


@pytest.mark.parametrize("n", [*SIZES, FAR, 2**40 + 1])
def test_many_positions_at_once_are_those_one_by_one(n: int):
    permutation = Permutation(n, 2**64 - 1)
    positions = np.array(sorted({*range(min(n, 200)), n // 2, n - 1}), dtype=np.int64)
    assert permutation.items(positions).tolist() == [permutation[int(position)] for position in positions]
    assert permutation.items(positions[::-1]).tolist() == permutation.items(positions).tolist()[::-1]
    assert permutation.items(positions[:0]).tolist() == []


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
    permutation = Permutation(n, 0)
    for position in (-1, n, n + 1, 2**62):
        with pytest.raises(IndexError, match=rf"position {position} is outside \[0, {n}\)"):
            permutation[position]
        for positions in ([position, 0], [0, position]):
            with pytest.raises(IndexError):
                permutation.items(np.array(positions))


@pytest.mark.parametrize("n", [0, -3])
def test_no_items_are_refused(n: int):
    with pytest.raises(ValueError, match=f"a permutation of {n} items: wanted at least 1"):
        Permutation(n, 0)


@pytest.mark.parametrize("n", [n for n in SIZES if n > 2])  # 1 and 2 lie in a range of 4
def test_fewer_than_two_walks_are_needed_on_average(n: int, scrambled: list[int]):
    order(n, 0)
    assert n <= len(scrambled) < 2 * n


@pytest.mark.parametrize("n", [FAR, 2**33 + 1])  # the second one's range is all but twice as large
def test_far_positions_need_few_walks_too(n: int, scrambled: list[int]):
    permutation, positions = Permutation(n, 7), range(0, n, n // 10_000)
    assert all(0 <= permutation[position] < n for position in positions)
    assert len(scrambled) < 2.1 * len(positions)


def position_of(permutation: Permutation, item: int) -> int:
    """The position of an item: the way back, round by round and walk by walk; -1 if none leads there."""
    bits, low_mask, high_mask = permutation._low_bits, permutation._low, permutation._high
    for _ in range(100):
        high, low = item >> bits, item & low_mask
        for first, second in zip(permutation._keys[-2::-2], permutation._keys[::-2], strict=True):
            low ^= mix((high + second) & MASK) & low_mask
            high ^= mix((low + first) & MASK) & high_mask
        item = high << bits | low
        if item < permutation.n:
            return item
    return -1


@pytest.mark.parametrize("n", [1438, FAR, 2**33 + 1])
def test_the_way_back_is_the_way(n: int):
    permutation = Permutation(n, 7)
    for position in (0, 1, n // 2, n - 2, n - 1, *range(0, n, n // 100)):
        assert position_of(permutation, permutation[position]) == position


def test_far_items_are_all_different():
    permutation, block = Permutation(FAR, 7), 25_000
    blocks = (range(0, block), range(FAR // 2, FAR // 2 + block), range(FAR - block, FAR))
    positions = {*itertools.chain(*blocks), *range(0, FAR, FAR // block)}
    assert len({permutation[position] for position in positions}) == len(positions) > 3.9 * block


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
