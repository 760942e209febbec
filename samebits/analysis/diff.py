"""Whether two runs are equal, their first difference (its step, its phase and its tensors), and the likely causes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..address.address import address_differences
from ..base.text import differences, short, some
from ..core.flags import FLAGS
from ..record.chain import HAS_WEIGHTS, SUM
from ..record.chains import first_difference
from ..record.view import RunView

ANYWHERE = "anywhere"  # a phase that nobody knows
AFTER, MEASURING = "after the last step", "the final metrics"  # what no step of a trace holds
SUMS = "which one run alone makes"  # of a sum
EQUAL, SO_FAR, DIFFERENT, UNKNOWN = "EQUAL", "EQUAL SO FAR", "DIFFERENT", "UNKNOWN"
PHASES = ("batch", "output", "loss", "gradient", "weights", "optimizer")  # in the order of a step


@dataclass(frozen=True)
class Place:
    """The first difference: step, phase, and the tensors that differ in it (none at level `step`).

    `number` is that of the sum in its step: 0, but in loops that iterate over a step more than once.
    """

    step: int
    phase: str
    tensors: tuple[str, ...]
    of: int  # how many tensors the phase has
    number: int = 0

    def __str__(self) -> str:
        named = f", {self.tensors[0]}" if self.tensors else ""
        more = f" and {len(self.tensors) - 1} more of {self.of}" if len(self.tensors) > 1 else ""
        again = f", sum {self.number}" if self.number else ""
        return f"step {self.step}{again}, {self.phase}{named}{more}"


@dataclass(frozen=True)
class Verdict:
    """Whether two runs are equal: in a word, in words that follow their names, and where they differ."""

    word: str
    said: str
    place: Place | None = None


def load(path: Path, name: str = "") -> RunView:
    """The run in a run directory, its trace as far as it goes, or that of a receipt alone.

    The whole trace is not read: what two runs have in common is found by bisection.

    Raises:
        UserError: there is too little to compare, or a record is missing or damaged.
        RunError: the lone receipt was altered.
    """
    run = RunView(path, name, every_row=False)
    run.require_comparable()
    return run


def verdict(one: RunView, other: RunView) -> Verdict:
    """Whether two runs are equal, by all that their traces and their receipts state."""
    sides, lengths = (one, other), (one.traced, other.traced)
    if doubts := [f"{side.name}: {doubt}" for side in sides for doubt in side.doubts]:
        return Verdict(UNKNOWN, f"cannot be compared: {some(doubts)}")
    if place := first_place(one, other):
        return Verdict(DIFFERENT, f"first differ at {place}", place)
    traced, finished = all(lengths), bool(one.weights and other.weights)
    if traced and lengths[0] != lengths[1]:
        counts = f"{one.name} has {lengths[0]}, {other.name} has {lengths[1]}"
        return Verdict(SO_FAR, f"have equal bits for {min(lengths)} steps: {counts}")
    if one.root and other.root and one.root != other.root:
        roots = f"{one.root} | {other.root}; both run directories are needed to find the step"
        return Verdict(DIFFERENT, f"have different trace roots: {roots}", Place(0, ANYWHERE, (), 0))
    equal = f"equal bits in all {max(lengths)} steps" if any(lengths) else "equal steps"
    equal = f"{equal}, trace root {one.root}" if one.root and one.root == other.root else ""
    if finished and one.weights != other.weights:
        said = f"have {equal}, then other final weights" if equal else "have different weights, and no trace of both"
        phase = AFTER if equal else ANYWHERE
        return Verdict(DIFFERENT, f"{said}: {one.weights} | {other.weights}", Place(max(lengths), phase, (), 0))
    if finished and one.outcome != other.outcome:
        found = [f"{d.field}: {d.one} | {d.other}" for d in differences(one.outcome, other.outcome)]
        said = f"have equal weights ({one.weights}), but other metrics: {some(found)}"
        return Verdict(DIFFERENT, said, Place(max(lengths), MEASURING, (), 0))
    if finished:
        ends = f"weights {one.weights} and metrics"
        return Verdict(EQUAL, f"have {equal}, {ends}" if equal else f"have equal {ends}; no trace of both")
    if equal:
        running = " and ".join(side.name for side in sides if not side.weights)
        return Verdict(SO_FAR, f"have {equal}; not finished, so that no receipt states its weights: {running}")
    return Verdict(UNKNOWN, "cannot be compared: a trace of both, or a receipt of both, is wanted")


def first_place(one: RunView, other: RunView) -> Place | None:
    """Return the first difference of two traces; None if there is none, as far as both go."""
    row = first_difference(one.steps, other.steps)
    if row is not None and (these := _sum(one.steps[row])) != (those := _sum(other.steps[row])):
        step, number = min(these, those)  # the other run has no such sum
        return Place(step, SUMS, (), 0, number)
    phases = [] if row is None else _phases(one.steps[row], other.steps[row])
    by_phase: dict[str, list[str]] = {}
    columns = [column for column in one.columns if column in other.columns]
    if one.tensors is not None and other.tensors is not None:
        finer = first_difference(one.tensors, other.tensors)
        if finer is not None and (row is None or finer <= row):
            if row is None or finer < row:  # the weights of each step, say, that the other trace does not have
                row, phases = finer, []
            these, those = one.tensors[row], other.tensors[row]
            for name in columns:
                if these[name] != those[name]:
                    by_phase.setdefault(name.split()[0], []).append(name.split(" ", 1)[1])
    if row is None:
        return None
    if not (phases or by_phase) and _is_end_of_prefix(row, one.steps, other.steps):
        return None
    phase = min([*phases, *by_phase], key=PHASES.index, default="weights")
    tensors = by_phase.get(phase, [])
    if phase == "gradient":
        tensors.reverse()  # the backward pass comes by the last one first
    of = sum(name.startswith(f"{phase} ") for name in columns)
    step, number = _sum(one.steps[row])
    return Place(step, phase, tuple(tensors), of, number)


def _sum(row: Any) -> tuple[int, int]:
    """The step of a row, and which of its sums it is."""
    return int(row["step"]), int(row["flags"]) >> SUM


def _is_end_of_prefix(row: int, one: Any, other: Any) -> bool:
    """Return True if a row is the last one of the shorter run, and that alone states weights there."""
    flags = int(one[row]["flags"]) ^ int(other[row]["flags"])
    return len(one) != len(other) and row + 1 == min(len(one), len(other)) and flags == HAS_WEIGHTS


def _phases(these: Any, those: Any) -> list[str]:
    both = these["flags"] & those["flags"] & HAS_WEIGHTS
    return [
        name
        for name in ("batch", "loss", "gradient", "weights")
        if these[name] != those[name] and (name != "weights" or both)
    ]


# Causes of a first difference in a phase, likeliest first: phases, the pattern of a field, the sentence that says why.
ANY = ".*"
CAUSES = (
    (ANY, r"seed", "every random number is derived from the seed"),
    (ANY, r"start\..*", "the run begins with other weights, or another state"),
    ("batch", r"data\.|config\.data\.", "the batch is made of other data"),
    ("batch", r"code\.(data|prepare)\.py|core\.(sampling|plan|order|seeds)", "this code makes the batches"),
    ("batch", r"config\.parallel\.|config\.train\.epochs", "it decides which samples a step sees"),
    ("gradient", r"config\.parallel\.|world_size", "it decides how gradients are summed"),
    ("gradient", r"core\.(tree|transport|accumulate|buckets|sharded|fsdp)", "it decides how gradients are summed"),
    ("output|loss|gradient", r"config\.model\.", "it is another network"),
    ("output|loss|gradient", r"code\.model\.py", "this code is the network"),
    ("weights|optimizer", r"config\.train\.", "the optimizer's step depends on it"),
    ("weights|optimizer", r"code\.train\.py", "this code holds the optimizer and its settings"),
    ("output|loss|gradient|weights|optimizer", r"config\.compute\.", "it is another arithmetic"),
    (ANY, r"flags\..*", "{why}"),
    (ANY, r"threads|variables\.(OMP|MKL)_NUM_THREADS", "the thread count decides how sums are split"),
    (ANY, r"cpu\.|cuda\.|device", "other hardware, or another instruction set, rounds in another order"),
    (ANY, r"torch\.|numpy|python|image|lock\.", "other libraries compute with other kernels"),
    (ANY, r"variables\..*", "libraries read this variable"),
    (ANY, r"own_variables\..*", "environment.variables lists it, as what the code reads"),
    (ANY, r"code\..*|core.*", "the code differs"),
    (ANY, r"config\..*", "other numbers were asked for"),
)
# The conclusion for each phase if nothing that is recorded differs.
UNRECORDED = {
    "batch": "seed, data and code are the same, so the batch was made with randomness that nobody seeds: a generator "
    "of its own, the time, os.urandom, an unordered set, or a worker that keeps state",
    "output": "the batch is the same, so the forward pass draws from a generator that is not seeded per micro-batch, "
    "or an operation in it has no fixed order, or memory or hardware failed",
    "gradient": "batch and loss are the same, so an operation in the backward pass has no fixed order, or a bit "
    "flipped in memory or hardware: integrity.recompute_every finds hardware that computes wrong",
    "weights": "the gradients are the same, so the optimizer's state or the weights were changed: by memory or "
    "hardware, or by what code does outside the step",
}
UNRECORDED[AFTER] = (
    "the steps are the same, so code between the last step and run.finish() changed the weights: by what the loop "
    "keeps for itself (name it in run.steps(state=...)), or with randomness that nobody seeds"
)
UNRECORDED[MEASURING] = "the weights are the same, so the evaluation does not repeat, or a receipt was altered"
UNRECORDED[SUMS] = "the loops iterate over the step so many times: what they go by is state or data that nobody saves"
UNRECORDED[ANYWHERE] = "nothing that is recorded differs: compare the run directories, whose traces tell the phase"
UNRECORDED |= {"loss": UNRECORDED["output"], "optimizer": UNRECORDED["weights"]}


def causes(place: Place, one: RunView, other: RunView) -> list[str]:
    """The likely causes of the difference, likeliest first, each with the sentence that says why."""
    records = one.address, other.address
    is_known = all("preimage" in record for record in records)
    differing = address_differences(*records) if is_known else differences(one.addressed, other.addressed)
    differing += differences(one.numeric, other.numeric)
    ranked = sorted(((*_cause(place.phase, d.field), d) for d in differing), key=lambda each: each[0])
    sentences = [f"{d.field}: {short(d.one)} | {short(d.other)}: {why}" for _, why, d in ranked]
    for side in (one, other):
        if place.phase == AFTER and side.resumed:
            lost = "what its loop kept for itself was lost, if state= does not name it"
            sentences.insert(0, f"{side.name} was resumed after step {side.resumed[-1]}: {lost}")
        elif place.phase in PHASES and place.step in side.resumed:
            sentences.insert(0, f"{side.name} was resumed just before step {place.step}: it went on from another state")
    return sentences or [UNRECORDED[place.phase]]


def reason(phase: str, field: str) -> str:
    """Why a field may be the cause of a first difference in a phase, or ANYWHERE."""
    return _cause(phase, field)[1]


def _cause(phase: str, field: str) -> tuple[int, str]:
    """The place of a field among the likely causes, and why it is one."""
    for rank, (phases, pattern, why) in enumerate(CAUSES):
        if (phase not in PHASES or re.fullmatch(phases, phase)) and re.match(pattern, field):
            reasons = {f"flags.{flag.name}": flag.why for flag in FLAGS}
            return rank, why.format(why=reasons.get(field, "a flag differs"))
    return len(CAUSES), "it differs"


def report(one: RunView, other: RunView) -> tuple[bool, list[str]]:
    """Return True if the runs are equal, and the lines to print: the verdict first."""
    found = verdict(one, other)
    lines = [f"{found.word}: {one.name} and {other.name} {found.said}"]
    if place := found.place:
        if place.phase in PHASES:
            lines.append(f"equal before: {place.step} steps" if place.step else "no step before it")
        lines += ["causes, likeliest first:", *(f"  {text}" for text in causes(place, one, other))]
    shorter, longer = sorted((one, other), key=lambda run: run.traced)
    if found.word == SO_FAR and shorter.weights and shorter.traced < longer.traced:
        lines.append(f"{shorter.name} is a prefix of {longer.name}: it ends after {shorter.traced} steps")
        if longer.weights:
            lines.append(f"final weights: {one.weights} | {other.weights}")
    return found.word == EQUAL, lines
