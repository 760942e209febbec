"""A keyed permutation of [0, n): any position in constant time and memory, without a list.

A Feistel network permutes [0, 2**bits), the smallest such range that holds n; positions that land
at n or beyond are permuted again until they fall below n ("cycle walking": J. Black and P. Rogaway,
"Ciphers with arbitrary finite domains", 2002). Fewer than two walks are needed on average.

Arithmetic is modulo 2**64: on python's integers for one position, on numpy's for many at once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
ROUNDS = 12  # even, so that halves of unequal width end where they began; small ranges need the extra ones


def mix(word: Any) -> Any:
    """Scramble 64 bits: an integer's, or those of each number in an array of uint64.

    It is the finaliser of splitmix64, with S. Vigna's public-domain constants.
    """
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


class Permutation:
    """The permutation of [0, n) that belongs to a 64-bit key; `permutation[i]` is where position i goes."""

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} items: wanted at least 1")
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._low, self._high = (1 << bits // 2) - 1, (1 << (bits - bits // 2)) - 1
        self._keys = [mix((key + r * 0x9E3779B97F4A7C15) & MASK) for r in range(1, ROUNDS + 1)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} is outside [0, {self.n})")
        index = self._encrypt(position)
        while index >= self.n:
            index = self._encrypt(index)
        return index

    def items(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The items at many positions: (k,) to (k,). From some fifty on, it takes less time than one by one.

        Raises:
            IndexError: a position is outside [0, n).
        """
        if positions.size and not 0 <= positions.min() <= positions.max() < self.n:
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not all inside [0, {self.n})")
        index: NDArray[np.uint64] = self._encrypt(positions.astype(np.uint64))
        while (beyond := np.flatnonzero(index >= self.n)).size:
            index[beyond] = self._encrypt(index[beyond])
        return index

    def _encrypt(self, word: Any) -> Any:
        high, low = word >> self._low_bits, word & self._low
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            high ^= mix((low + first) & MASK) & self._high
            low ^= mix((high + second) & MASK) & self._low
        return high << self._low_bits | low
