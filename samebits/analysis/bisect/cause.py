"""`samebits bisect`: what makes two runs differ. Trainings are made, suspects exchanged, and the cause is named."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ...base.shape import plain
from ...base.text import Difference, differences, some
from ...core.errors import RunError, UserError
from .. import diff
from ..series import Made
from .bisect import Found, Kept, Trial, Trials, Verdict, needed, rate, search
from .commits import Clone, Commit
from .sides import Here, Question
from .suspects import Kind, Side, Suspect, composed, fault, field_of, suspects

FLAKY = 10  # runs of each side where one of them does not repeat
UNRECORDED = "nothing recorded differs, so the recorded run does not repeat, or hardware failed"
RARE = 3  # a cause that shows in one run of so many, as an example
EQUAL, FOUND, NOT_FOUND = "EQUAL", "CAUSE FOUND", "NO CAUSE FOUND"
Bits = tuple[str, str | None]


@dataclass(frozen=True)
class Answer:
    """What a bisect found."""

    verdict: str
    reason: str
    cause: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    place: str | None = None
    trials: Sequence[Trial] = ()
    commits: Sequence[Commit] = ()

    @property
    def exit_code(self) -> int:
        """The exit code."""
        return int(self.verdict == NOT_FOUND)

    def lines(self) -> Iterator[str]:
        """As it is told."""
        yield f"{self.verdict}: {self.reason}"
        for each in self.cause:
            partners = f" (only together with {', '.join(each['with'])})" if each["with"] else ""
            yield f"  {each['suspect']}: {each['a']} | {each['b']}: {each['why']}{partners}"
        if self.place:
            yield f"A and B first differ at {self.place}"
        if len(self.commits) > 1:
            yield f"no trial tells which of {len(self.commits)} commits it is:"
        yield from (f"commit {commit}" for commit in self.commits)
        yield from self.notes

    def record(self) -> dict[str, Any]:
        """The same as JSON has it."""
        trials = [
            {"kept": list(trial.kept), "bits": trial.verdict.value, "repeats": trial.repeats} for trial in self.trials
        ]
        commit = self.commits[0].digest if len(self.commits) == 1 else None
        return asdict(self) | {"trials": trials, "commit": commit}


def bisected(
    maker: Here | Clone, question: Question, report: Callable[[str], None], confidence: float = 0.95, repeats: int = 2
) -> Answer:
    """What makes A and B differ, each line told as it goes; both are made `repeats` times at first.

    Raises:
        UserError: A or B asks for what cannot be.
        RunError: A or B does not train.
    """
    if not 0 < confidence < 1:  # NaN, which is in every range of click
        raise UserError(f"--confidence {confidence}: a number below 1 wanted, for example 0.95")
    return _Bisection(maker, question, report, confidence, repeats).answer()


class _Bisection:
    """One bisect: the trainings of A and B, then the search."""

    def __init__(
        self, maker: Here | Clone, question: Question, report: Callable[[str], None], confidence: float, repeats: int
    ) -> None:
        self.maker, self.question, self.report = maker, question, report
        self.confidence, self.repeats = confidence, repeats
        self.sides = {"A": question.a, "B": question.b}
        self.suspects = suspects(question.a, question.b, question.files)
        self.made: dict[str, list[Made]] = {"A": [], "B": []}

    def answer(self) -> Answer:
        found = [each.name for each in self.suspects]
        self.report(f"{len(found)} suspect{'s' * (len(found) != 1)}{': ' * bool(found)}{some(found, 12)}")
        self._make(self.repeats)
        if all(map(self._steady, "AB")):
            if other := self._not_reproduced():
                return Answer(NOT_FOUND, other)
            if self._bits("A")[0] == self._bits("B")[0]:
                return self._equal()
            return self._searched("A", "B", 1)
        self._make(max(self.repeats, FLAKY))
        steady = [name for name in "AB" if self._steady(name)]
        if not steady:
            return Answer(NOT_FOUND, "the same settings do not repeat, neither in A nor in B", notes=self._shares())
        good, bad = (steady[0], "AB".replace(steady[0], ""))
        share = rate(self._bits(bad))
        repeats = needed(share, self.confidence)
        self.report(
            f"{bad} does not repeat: {share:.0%} of its runs are another way. A trial is EQUAL after {repeats} equal "
            f"runs (confidence {self.confidence:g}), and DIFFERS with the first run unlike {good}"
        )
        return self._searched(good, bad, repeats)

    def _make(self, count: int) -> None:
        """Make A and B this often in all."""
        for name, made in self.made.items():
            before = len(made)
            kept = [each.name for each in self.suspects] if name == "A" else []
            setup = composed(self.question.a, self.question.b, self.suspects, kept)
            while len(made) < count:
                made.append(self.maker.make(setup, len(made)))
            if len(made) > before:
                alike = "alike" if self._steady(name) else "NOT alike"
                self.report(f"{name}: weights {made[0].receipt.weights[:16]}, {len(made)} runs {alike}")

    def _bits(self, name: str) -> list[Bits]:
        return [made.bits for made in self.made[name]]

    def _steady(self, name: str) -> bool:
        return len(set(self._bits(name))) == 1

    def _shares(self) -> list[str]:
        return [f"{name}: {len(set(self._bits(name)))} outcomes in {len(self.made[name])} runs" for name in "AB"]

    def _equal(self) -> Answer:
        count = len(self.made["A"])
        often = needed(1 / RARE, self.confidence)
        verdict = f"nothing to bisect: EQUAL, weights {self.made['A'][0].receipt.weights}"
        more = f"a cause that shows in one run of {RARE} only needs --repeats {often}, {count} were made"
        return Answer(EQUAL, verdict, notes=[more] if count < often else [])

    def _not_reproduced(self) -> str | None:
        """Why the recorded bits do not come again here, where they do not."""
        for name, recorded in self.question.recorded.items():
            made, there = self.made[name][0], recorded.stated
            trace = made.bits[1] if there["trace"] else None
            if (made.bits[0], trace) == (recorded.weights, there["trace"]):
                continue
            requested, environment = (
                differences(there[part], made.receipt.stated[part]) for part in ("preimage", "environment")
            )
            found = requested or [each for each in environment if each.field.startswith("preimage.")]
            return (
                f"{name} is not reproduced here, so no trial can be compared with it: weights {recorded.weights} "
                f"recorded, {made.bits[0]} in {len(self.made[name])} runs here; "
                f"{f'what differs there and here: {some([*map(_reported, found)])}' if found else UNRECORDED}"
            )
        return None

    def _searched(self, good: str, bad: str, repeats: int) -> Answer:
        """The cause, if giving the values of the `good` side, which repeats, to the `bad` one shows it."""
        sides = self.sides[good], self.sides[bad]
        exchanged = suspects(*sides, self.question.files)
        names = [each.name for each in self.suspects]
        reference = self.made[good][0].bits

        def judged(make: Callable[[], Made]) -> Verdict:
            try:
                return Verdict.EQUAL if make().bits == reference else Verdict.DIFFERS
            except RunError as failure:
                said = [line for line in str(failure).splitlines() if line.strip()] or [""]
                self.report(f"     cannot be trained: {plain(said[-1].strip())[:200]}")
                return Verdict.UNRESOLVED

        def draw(kept: Kept, number: int) -> Verdict:
            return judged(lambda: self.maker.make(composed(*sides, exchanged, kept), number))

        def trial(trial: Trial) -> None:
            of = f"{len(trial.kept)} of {len(names)} as in {good}"
            runs = f", {trial.repeats} runs" if repeats > 1 else ""
            shown = some(trial.kept, 4) or "none"
            self.report(f"{trial.number:3}  {of}: {shown}: {trial.verdict.value}{runs}, {trial.seconds:.1f} s")

        trials = Trials(names, draw, repeats, trial)
        for name, kept in ((good, frozenset(names)), (bad, frozenset[str]())):
            seen = [Verdict.EQUAL if bits == reference else Verdict.DIFFERS for bits in self._bits(name)]
            trials.know(kept, seen)
        if not (found := search(trials)):
            said = f"the same settings do not repeat: {good} does not either"
            return Answer(NOT_FOUND, said, notes=self._shares(), trials=trials.done)
        commits, notes = self._commits(found, judged, repeats, exchanged, sides)
        place = self._place(good, bad)
        return Answer(
            FOUND, self._headline(found, good, bad), self._causes(found, place),
            [*self._untried(found, good), *notes], str(place) if place else None, trials.done, commits,
        )  # fmt: skip

    def _headline(self, found: Found, good: str, bad: str) -> str:
        exactly = "exactly this makes" if len(found.names) == 1 else f"exactly these {len(found.names)} make"
        changed = some([plain(name) for name in found.changed], 12)
        return f"{bad} with the value of {good} for {changed} is EQUAL to {good}; {exactly} them differ (A | B)"

    def _untried(self, found: Found, good: str) -> list[str]:
        return [
            f"{name}: no trial can be made without the value of {good}, so its need is not shown"
            for name in found.untried
        ]

    def _place(self, good: str, bad: str) -> diff.Place | None:
        other = next(made for made in self.made[bad] if made.bits != self.made[good][0].bits)
        return diff.first_place(diff.load(self.made[good][0].folder), diff.load(other.folder))

    def _causes(self, found: Found, place: diff.Place | None) -> list[dict[str, Any]]:
        causes, phase = [], place.phase if place else diff.ANYWHERE
        for each in self.suspects:
            if each.name in found.names:
                together = {name for cause in found.causes if each.name in cause for name in cause}
                why = fault(each, *self.sides.values()) or diff.reason(phase, field_of(each))
                facts = {"suspect": each.name, "a": _shown(each.a), "b": _shown(each.b), "why": why}
                causes.append(facts | {"with": sorted(together - {each.name})})
        return causes

    def _commits(
        self, found: Found, judged: Callable[[Callable[[], Made]], Verdict], repeats: int,
        exchanged: Sequence[Suspect], sides: tuple[Side, Side],
    ) -> tuple[list[Commit], list[str]]:  # fmt: skip
        """The commits that brought the files which are a cause, and what is to know of the search for them."""
        files = [each.key for each in exchanged if each.kind is Kind.FILE and each.name in found.names]
        good, bad = (side.commit for side in sides)
        if not files or not good or not bad or not isinstance(self.maker, Clone):
            return [], []
        named = {each.name for each in exchanged if each.key in files and each.kind is Kind.FILE}
        partners = {name for cause in found.causes if named & {*cause} for name in cause} - named
        setup = composed(*sides, exchanged, [each.name for each in exchanged if each.name not in partners])

        def trial(commit: str, make: Callable[[int], Made]) -> Verdict:
            verdicts, begun = (judged(partial(make, number)) for number in range(repeats)), time.monotonic()
            verdict = next((each for each in verdicts if each is not Verdict.EQUAL), Verdict.EQUAL)
            self.report(f"     commit {commit[:12]}: {verdict.value}, {time.monotonic() - begun:.1f} s")
            return verdict

        try:
            return self.maker.first_bad(setup, good, bad, files, trial), []
        except RunError as failure:
            return [], [f"the commit is not known: {plain(str(failure))}"]


def _reported(difference: Difference) -> str:
    return plain(f"{difference.field}: {difference.one} there, {difference.other} here")


def _shown(value: Any) -> Any:
    return plain(value) if isinstance(value, str) else json.loads(json.dumps(value))
