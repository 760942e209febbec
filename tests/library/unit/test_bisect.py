"""The search of `samebits bisect` alone, by oracles that train nothing: it names exactly the suspects that matter."""

import random
from collections.abc import Callable, Collection, Sequence
from itertools import combinations

import pytest

from samebits.analysis.bisect.bisect import (
    LEAST,
    Found,
    Kept,
    Trial,
    Trials,
    Verdict,
    fewest,
    needed,
    rate,
    search,
)
from samebits.analysis.bisect.suspects import WHY_RANKS, Kind, Side, Suspect, fault

EQUAL, DIFFERS, UNRESOLVED = Verdict.EQUAL, Verdict.DIFFERS, Verdict.UNRESOLVED
NAMES = tuple(f"suspect {number}" for number in range(20))
PAIRS = [*combinations(range(0, 20, 3), 2)]
Causes = Collection[Collection[int]]  # each shows where B has all its suspects


def exchanged(causes: Causes, names: Sequence[str] = NAMES) -> Callable[[Kept], Verdict]:
    """An oracle: a trial differs where some cause has B's values for all its suspects."""

    def verdict(kept: Kept) -> Verdict:
        return DIFFERS if any(not any(names[each] in kept for each in cause) for cause in causes) else EQUAL

    return verdict


def searched_by(oracle: Callable[[Kept], Verdict], names: Sequence[str] = NAMES) -> tuple[Found, Trials]:
    trials = Trials(names, lambda kept, number: oracle(kept))
    found = search(trials)
    assert found
    return found, trials


def searched(causes: Causes, names: Sequence[str] = NAMES) -> tuple[Found, Trials]:
    return searched_by(exchanged(causes, names), names)


def named(found: Found) -> set[frozenset[int]]:
    return {frozenset(NAMES.index(name) for name in cause) for cause in found.causes}


@pytest.mark.parametrize(
    ("causes", "changed", "most"),  # how many of the suspects are changed, in at most so many trials
    [
        *(([[one]], 1, 13) for one in range(20)),  # two halves at each of five levels, and the proof
        *(([[one], [other]], 2, 60) for one, other in PAIRS),  # two that are independent
        *(([pair], 1, 400) for pair in PAIRS),  # two that work only together
        ([[2, 11], [17]], 2, 400),
        ([[0, 9, 19]], 1, 400),
        ([[each] for each in range(20)], 20, 100),
    ],
)
def test_causes_of_twenty_are_all_named(causes: Causes, changed: int, most: int):
    found, trials = searched(causes)
    assert named(found) == {frozenset(cause) for cause in causes} and found.untried == ()
    assert len(found.changed) == changed and len(trials.done) < most


@pytest.mark.parametrize("seed", range(200))
def test_answer_is_a_smallest_one_for_any_causes(seed: int):
    """Whatever works with whatever: the changed set is 1-minimal, and each cause alone makes A differ, also minimal."""
    draw = random.Random(seed)
    names = NAMES[: draw.randint(1, 12)]
    causes = [draw.sample(range(len(names)), draw.randint(1, min(3, len(names)))) for _ in range(draw.randint(1, 4))]
    found, trials = searched(causes, names)
    oracle = exchanged(causes, names)
    assert oracle(frozenset(found.changed)) is EQUAL
    assert all(oracle(frozenset({*found.changed} - {name})) is DIFFERS for name in found.changed)
    for cause in found.causes:
        assert oracle(frozenset({*names} - {*cause})) is DIFFERS
        assert all(oracle(frozenset({*names} - ({*cause} - {name}))) is EQUAL for name in cause)
    assert len({trial.kept for trial in trials.done}) == len(trials.done)  # none is made twice


@pytest.mark.parametrize(("together", "cause"), [((3, 4), 3), ((11, 13), 12), ((0, 19), 19), ((5, 6), 6)])
def test_combinations_that_cannot_be_trained_are_gone_around(together: tuple[int, int], cause: int):
    """Two suspects that must have the values of one side: all trials with one of them alone are refused."""

    def oracle(kept: Kept) -> Verdict:
        if len({NAMES[each] in kept for each in together}) > 1:
            return UNRESOLVED
        return exchanged([[cause]])(kept)

    found, trials = searched_by(oracle)
    assert UNRESOLVED in {trial.verdict for trial in trials.done}
    expected = set(together) if cause in together else {cause}
    assert {NAMES.index(name) for name in found.changed} == expected and cause in {*map(NAMES.index, found.names)}
    assert oracle(frozenset(found.changed)) is EQUAL
    assert {*found.untried} == ({NAMES[each] for each in together} if cause in together else set())


def test_suspect_that_makes_a_trial_possible_is_no_cause():
    """Suspect 5 needs B's value of 6 to be tried with its own, as one micro-batch needs one rank: 6 changes nothing."""
    found, _ = searched_by(
        lambda kept: UNRESOLVED if NAMES[5] not in kept and NAMES[6] in kept else exchanged([[5]])(kept)
    )
    assert found.changed == (NAMES[5],) and found.names == {NAMES[5]}


def test_everything_alone_is_refused():
    found, _ = searched_by(lambda kept: {20: EQUAL, 0: DIFFERS}.get(len(kept), UNRESOLVED))
    assert set(found.changed) == set(found.untried) == set(NAMES)


def test_two_differences_that_undo_each_other_are_told_as_they_are():
    """B has both, and differs by a third alone: either of the two makes A differ, and both do not."""

    def oracle(kept: Kept) -> Verdict:
        alone = (NAMES[0] in kept) != (NAMES[1] in kept)
        return DIFFERS if alone or NAMES[2] not in kept else EQUAL

    assert searched_by(oracle)[0] == Found((NAMES[2],), ((NAMES[2],),))


def test_fewest_keeps_the_order():
    assert fewest(list(range(8)), lambda numbers: {2, 5} <= {*numbers}) == [2, 5]


def test_trials_are_told_one_by_one():
    message: list[Trial] = []
    search(Trials(NAMES[:4], lambda kept, number: exchanged([[2]])(kept), report=message.append))
    assert [trial.number for trial in message] == [*range(1, len(message) + 1)]
    assert message[0].kept == NAMES[:4] and message[0].verdict is EQUAL and message[0].repeats == 1


def test_what_is_known_is_not_made_again():
    trials = Trials(NAMES, lambda kept, number: exchanged([[2]])(kept), repeats=3)
    trials.know(frozenset(NAMES), [EQUAL] * 3)
    trials.know(frozenset(), [EQUAL, DIFFERS])
    found = search(trials)
    assert found and found.changed == (NAMES[2],)
    assert not any(len(trial.kept) in (0, 20) for trial in trials.done)


# ---- causes that show in a share of the runs


def flaky(causes: Causes, shares: dict[int, float], seed: int, names: Sequence[str] = NAMES[:6]) -> Trials:
    """Trials of causes that show in these shares of the runs, after ten runs of A and of B, as the verb has them."""
    draw = random.Random(seed)

    def verdict(kept: Kept, number: int) -> Verdict:
        seen = [draw.random() < shares[number] for number in range(len(causes))]
        return exchanged([cause for cause, shows in zip(causes, seen, strict=True) if shows], names)(kept)

    runs = [verdict(frozenset(), number) for number in range(10)]
    trials = Trials(names, verdict, needed(rate(runs), 0.95))
    trials.know(frozenset(names), [EQUAL] * 10)
    trials.know(frozenset(), [DIFFERS, *runs])  # without a difference there would be no search
    return trials


@pytest.mark.parametrize("shares", [(0.2,), (1 / 3,), (0.5,), (0.9,), (1 / 3, 1.0)])
def test_wrong_answers_stay_below_the_stated_level(shares: tuple[float, ...]):
    """1,000 searches for causes that show in these shares of the runs: fewer than 5 % of the answers are wrong."""
    wrong = 0
    for seed in range(1000):
        causes = [seed % 6, (seed + 3) % 6][: len(shares)]
        trials = flaky([[each] for each in causes], dict(enumerate(shares)), seed)
        if len(shares) > 1:  # where one of them always shows, the outcomes of B do not tell how often the other does
            trials.repeats = needed(shares[0], 0.95)
        found = search(trials)
        wrong += not found or found.names != {NAMES[each] for each in causes}
    assert wrong < 50


def test_one_run_that_differs_is_enough():
    made: list[int] = []

    def draw(kept: Kept, number: int) -> Verdict:
        made.append(number)
        return DIFFERS if number == 2 else EQUAL

    trials = Trials(NAMES, draw, repeats=8)
    assert trials(NAMES[:3]) is DIFFERS and made == [0, 1, 2]
    assert trials(NAMES[:3]) is DIFFERS and made == [0, 1, 2]


def test_side_that_does_not_repeat_has_no_cause():
    trials = Trials(NAMES, lambda kept, number: DIFFERS if number == 4 else EQUAL, repeats=8)
    assert search(trials) is None


@pytest.mark.parametrize(
    ("share", "confidence", "runs"),
    [(1, 0.95, 1), (0.5, 0.95, 5), (1 / 3, 0.95, 8), (0.1, 0.95, 29), (1 / 3, 0.7, 3), (0.9, 0.9, 1), (0.9, 0.99, 2)],
)
def test_number_of_runs(share: float, confidence: float, runs: int):
    assert needed(share, confidence) == runs
    assert (1 - share) ** runs <= 1 - confidence + 1e-12 and (runs == 1 or (1 - share) ** (runs - 1) > 1 - confidence)


def test_share_of_runs_unlike_the_most_frequent_outcome():
    assert rate("aaab") == 0.25 and rate("ab") == 0.5 and rate("abcd") == 0.75 and rate("a" * 99 + "b") == LEAST


@pytest.mark.parametrize(("reduce", "why"), [(None, WHY_RANKS), ("tree", WHY_RANKS), ("ddp", None)])
def test_world_size_can_be_a_cause_only_in_an_earlier_release_with_reduce_ddp(reduce: str | None, why: str | None):
    earlier, now = Side({"parallel.reduce": reduce} if reduce else {}, ranks=1), Side({}, ranks=2)
    suspect = Suspect("ranks", Kind.RANKS, "ranks", 1, 2)
    assert fault(suspect, earlier, now) == fault(suspect, now, earlier) == why
