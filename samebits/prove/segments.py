"""Which parts of a run are trained again. Known before its first step, so that their states are kept."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..config.settings import Prove

LEAST, SHARE = 9, 100  # steps of all segments together: so many, or one in so many of the run's
LATE = 10  # one in so many of a run's steps may be done when the early proof goes on from a state


@dataclass(frozen=True)
class Segment:
    """The steps from `first` on, before `stop`."""

    first: int
    stop: int

    def __str__(self) -> str:
        last = self.stop - 1
        return f"step {last}" if last == self.first else f"steps {self.first} to {last}"


def chosen(address: str, first: int, stop: int, epoch_ends: Callable[[int], int], prove: Prove) -> list[Segment]:
    """The segments of a run of the steps from `first` on, before `stop`; a function of its content address.

    The first one is the beginning, the second one crosses an epoch's end, the third one is the end, and any more lie
    anywhere. Where the end of the first epoch is that of the run, the second one lies in the middle. An `early` proof
    has one more, behind the first hundredth of the run, if the second one lies behind the first tenth. `epoch_ends`
    gives the number of steps after which the first epoch is done that ends later than the given step.
    """
    length = stop - first
    each = min(max(1, math.ceil((prove.steps or max(LEAST, length // SHARE)) / prove.segments)), length)
    last, crossing = stop - each, max(first, epoch_ends(first + 1) - 1 - (each - 1) // 2)
    begins = [first, crossing if crossing + each <= last else (first + last) // 2, last]
    begins += [first + _drawn(address, number) % (length - each + 1) for number in range(3, prove.segments)]
    begins = begins[: prove.segments]
    if prove.when == "early" and min(begins[1:], default=stop) > first + length // LATE:
        begins.append(min(first + max(each, length // SHARE), last))
    return [Segment(begin, begin + each) for begin in sorted({*begins})]


def _drawn(address: str, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{address} segment {number}".encode()).digest()[:8])
