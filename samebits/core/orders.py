"""Orders of samples other than uniform shuffles, as pure functions of an epoch's key.

An order is called with the number of samples and the key of an epoch, and gives what has `items(positions)`: the
samples at these positions of the epoch, of which there are as many as samples. `Permutation` is one.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import UserError
from .order import MASK, Permutation, mix

GOLDEN = 0x9E3779B97F4A7C15
POOL = 50  # groups that are sorted together


class Ordered(Protocol):
    """The samples of an epoch."""

    def items(self, positions: NDArray[np.int64]) -> NDArray[Any]: ...


Order = Callable[[int, int], Ordered]


class Weighted:
    """Draws samples with replacement, each as often as its weight says, such as the rare classes of a dataset.

    Several datasets are mixed by shares so: of `torch.utils.data.ConcatDataset([a, b])`, with the weights `share / len`
    of the dataset that a sample belongs to. An epoch is as many draws as there are samples.
    """

    def __init__(self, weights: ArrayLike) -> None:
        """`weights` is (samples,): at least 0, and not all of them 0."""
        given = np.asarray(weights, dtype=np.float64)
        if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any() or not (given > 0).any():
            raise UserError(
                f"samebits.Weighted: weights of shape {given.shape} given, one finite number for each sample wanted, "
                f"at least 0 and not all of them 0"
            )
        self.weights = weights  # a loop that changes them is refused: only their sums are used from here on
        self._sums, self._last = np.add.accumulate(given), int(np.flatnonzero(given)[-1])

    def __call__(self, samples: int, key: int) -> Ordered:
        """The draws of an epoch."""
        require_one_each("samebits.Weighted: weights", len(self._sums), samples)
        return _Drawn(self._sums, self._last, key)


class _Drawn:
    def __init__(self, sums: NDArray[np.float64], last: int, key: int) -> None:
        self._sums, self._last, self._key = sums, last, np.uint64(key)

    def items(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """The samples whose share of all weights a number of each position falls into."""
        with np.errstate(over="ignore"):  # modulo 2**64
            words = mix(self._key + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
        shares = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._sums[-1]
        return np.minimum(np.searchsorted(self._sums, shares, side="right"), self._last)


class ByLength:
    """Shuffles samples, and lets those of about one length follow each other, so that little is padded.

    Groups of `size` samples, such as a micro-batch, are cut from pools of fifty that are sorted by length; then the
    groups are shuffled. Each sample comes once in an epoch.
    """

    def __init__(self, lengths: ArrayLike, size: int) -> None:
        """`lengths` is (samples,); `size` is best parallel.global_batch // parallel.micro_batches."""
        self.lengths, self._lengths = lengths, np.asarray(lengths)
        if self._lengths.ndim != 1 or size < 1:
            raise UserError(
                f"samebits.ByLength: lengths of shape {self._lengths.shape} and size {size} given, one number for "
                f"each sample and at least 1 wanted"
            )
        self._size = size

    def __call__(self, samples: int, key: int) -> Ordered:
        """The samples of an epoch, all at once: eight bytes for each."""
        require_one_each("samebits.ByLength: lengths", len(self._lengths), samples)
        places = np.arange(samples)
        shuffled = Permutation(samples, key).items(places)
        shuffled = shuffled[np.lexsort((self._lengths[shuffled], places // (POOL * self._size)))]
        groups = samples // self._size
        if groups:
            turns = Permutation(groups, mix(key ^ GOLDEN) & MASK).items(np.arange(groups))
            cut = groups * self._size  # what is left over stays last
            shuffled[:cut] = shuffled[:cut].reshape(groups, self._size)[turns].reshape(-1)
        return _Listed(shuffled)


class _Listed:
    def __init__(self, samples: NDArray[Any]) -> None:
        self._samples = samples

    def items(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """The samples at these positions."""
        return self._samples[positions]


def require_one_each(what: str, count: int, samples: int) -> None:
    """Refuse another number than that of the samples."""
    if count != samples:
        raise UserError(f"{what}: {count} given, {samples} wanted, one for each sample of the dataset")
