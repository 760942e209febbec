"""The smallest set of suspects that makes two things equal, by delta debugging. It knows no training.

A trial gives the value of A to some suspects, and the value of B to the others; it is EQUAL where the outcome is A's.
A cause may show in a share of the runs only: then a trial counts as EQUAL after so many repeats that a difference of
that share would have been missed with a chance below one less the confidence. One repeat that differs is enough.
"""

import enum
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

LEAST = 0.1  # share of the runs: a trial is not repeated as often as a rarer cause would need

Kept = frozenset[str]  # the suspects that hold A's value


class Verdict(enum.Enum):
    """The outcome of a trial; UNRESOLVED where it cannot be made."""

    EQUAL, DIFFERS, UNRESOLVED = "EQUAL", "DIFFERS", "unresolved"


@dataclass(frozen=True)
class Trial:
    """A trial that is done: how often it was made, and how long that took (s)."""

    number: int
    kept: tuple[str, ...]
    verdict: Verdict
    repeats: int
    seconds: float


class Trials:
    """Trials of these suspects. Each is made once, or `repeats` times as long as it is EQUAL.

    `draw` makes a trial for the first, second … time (counted from 0) and says how it came out.
    """

    def __init__(
        self,
        names: Sequence[str],
        draw: Callable[[Kept, int], Verdict],
        repeats: int = 1,
        report: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self.names, self.repeats, self.done = tuple(names), repeats, list[Trial]()
        self._draw, self._report, self._seen = draw, report, dict[Kept, list[Verdict]]()

    def know(self, kept: Kept, seen: Iterable[Verdict]) -> None:
        """Take over outcomes of a trial that were seen before."""
        self._seen[kept] = [*seen]

    def __call__(self, kept: Iterable[str]) -> Verdict:
        """How a trial comes out."""
        return self._made(frozenset(kept), self.repeats)

    def again(self, kept: Kept) -> Verdict:
        """How a trial comes out that is made anew; where each is made once, as it did."""
        return self._made(kept, self.repeats + (len(self._seen[kept]) if self.repeats > 1 else 0))

    def _made(self, kept: Kept, wanted: int) -> Verdict:
        seen, begun = self._seen.setdefault(kept, []), time.monotonic()
        before = len(seen)
        while _verdict(seen) is Verdict.EQUAL and len(seen) < wanted:
            seen.append(self._draw(kept, len(seen)))
        if len(seen) > before:
            order = tuple(name for name in self.names if name in kept)
            trial = Trial(len(self.done) + 1, order, _verdict(seen), len(seen), time.monotonic() - begun)
            self.done.append(trial)
            self._report(trial)
        return _verdict(seen)


def _verdict(seen: Sequence[Verdict]) -> Verdict:
    return next((each for each in (Verdict.DIFFERS, Verdict.UNRESOLVED) if each in seen), Verdict.EQUAL)


@dataclass(frozen=True)
class Found:
    """What makes A and B differ.

    Attributes:
        changed: a smallest set: B with A's values for it alone is equal to A.
        causes: for each of them, the suspects that make A differ if they alone have B's values. Those of one cause
            work only together.
        untried: members of `changed` without which no trial can be made, so that nobody knows whether they are needed.
    """

    changed: tuple[str, ...]
    causes: tuple[tuple[str, ...], ...]
    untried: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """All suspects that are a cause or a part of one."""
        return {name for cause in self.causes for name in cause}

    def claims(self, everything: Kept) -> Iterator[Kept]:
        """The trials whose outcome EQUAL this rests on."""
        yield frozenset(self.changed)
        for cause in self.causes:
            if len(cause) > 1:
                yield from (everything - (set(cause) - {name}) for name in cause)


def search(trials: Trials) -> Found | None:
    """What makes the outcome of B that of A; None where A itself does not repeat. B must differ from A.

    Where a trial is repeated, the outcome EQUAL that the answer rests on is made anew at the end: it was chosen
    among others, and a difference may have been missed. If one shows now, the search goes on.
    """
    everything = frozenset(trials.names)
    while trials(everything) is Verdict.EQUAL:
        found = _search(trials, everything)
        claims = [kept for kept in found.claims(everything) if trials(kept) is Verdict.EQUAL]
        if all(trials.again(kept) is Verdict.EQUAL for kept in claims):
            return found
    return None


def _search(trials: Trials, everything: Kept) -> Found:
    changed = fewest(trials.names, lambda names: trials(names) is Verdict.EQUAL)
    causes, untried = dict[tuple[str, ...], None](), []
    for name in changed:
        others = [each for each in changed if each != name]
        if others and trials(others) is Verdict.UNRESOLVED:
            untried.append(name)
        partners = _partners(trials, everything, name, others)
        causes[tuple(each for each in trials.names if each == name or each in partners)] = None
    return Found(tuple(changed), tuple(causes), tuple(untried))


def _partners(trials: Trials, everything: Kept, name: str, others: Sequence[str]) -> Sequence[str]:
    """The fewest suspects that must have B's values too, so that this one makes A differ."""

    def differs(partners: Sequence[str]) -> bool:
        return trials(everything - {name, *partners}) is Verdict.DIFFERS

    rest = [each for each in trials.names if each != name and each not in others]
    if differs([]) or not differs(rest):
        return []
    found = {name, *fewest(rest, differs)}
    # without some of them, it may be that no trial can be made: that does not show that they matter
    needed = [each for each in found if trials(everything - (found - {each})) is Verdict.EQUAL]
    return [each for each in needed if each != name]


def fewest(names: Sequence[str], holds: Callable[[Sequence[str]], bool]) -> Sequence[str]:
    """A subset for which something holds, and for none that lacks one more name: ddmin.

    It must hold for all names, and must not hold for none of them. Zeller and Hildebrandt, Simplifying and Isolating
    Failure-Inducing Input, IEEE Transactions on Software Engineering 28 (2), 2002. A trial that cannot be made does
    not hold.
    """
    parts = 2
    while len(names) > 1:
        parts = min(parts, len(names))
        chunks = [names[len(names) * n // parts : len(names) * (n + 1) // parts] for n in range(parts)]
        rests = [[name for name in names if name not in chunk] for chunk in chunks] if parts > 2 else []
        if (chunk := next((each for each in chunks if holds(each)), None)) is not None:
            names, parts = chunk, 2
        elif (rest := next((each for each in rests if holds(each)), None)) is not None:
            names, parts = rest, parts - 1
        elif parts < len(names):
            parts *= 2
        else:
            break
    return names


def needed(rate: float, confidence: float) -> int:
    """How often a trial is made so that a difference in this share of the runs shows: the least n for which

    (1 - rate)^n <= 1 - confidence.
    """
    return 1 if rate >= 1 else max(1, math.ceil(math.log(1 - confidence) / math.log(1 - rate) - 1e-9))


def rate(outcomes: Sequence[Hashable]) -> float:
    """The share of the outcomes that are not the most frequent one; at least LEAST."""
    (_, count), *_ = Counter(outcomes).most_common(1)
    return max(LEAST, 1 - count / len(outcomes))
