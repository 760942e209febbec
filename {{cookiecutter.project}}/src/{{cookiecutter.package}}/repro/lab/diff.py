"""The first difference of two runs: its step, its phase and its tensors, and the likely causes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..asked.address import fields
from ..differences import Difference, differences, flatten
from ..errors import Refused
from ..machine.switches import SWITCHES
from ..records import chain, names, receipt
from ..records.reading import read_record

Rows = np.ndarray[Any, Any]
ANYWHERE = "anywhere"  # a phase that nobody knows
PHASES = ("batch", "output", "loss", "gradient", "weights", "optimizer")  # in the order of a step


@dataclass(frozen=True)
class Side:
    """One of the two runs: its records, and its trace (rows of digests)."""

    name: str
    address: Mapping[str, Any]
    environment: Mapping[str, Any]
    resumed: tuple[int, ...]  # after how many steps it went on
    root: str | None
    steps: Rows
    tensors: Rows | None
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The first difference: step, phase, and the tensors that differ in it (none at level `step`)."""

    step: int
    phase: str
    tensors: tuple[str, ...]
    of: int  # how many tensors the phase has

    def __str__(self) -> str:
        named = f", {self.tensors[0]}" if self.tensors else ""
        more = f" and {len(self.tensors) - 1} more of {self.of}" if len(self.tensors) > 1 else ""
        return f"step {self.step}, {self.phase}{named}{more}"


def load(path: Path, name: str = "") -> Side:
    """The records and the trace in a run directory; of a lone receipt, only its statements.

    Raises:
        Refused: something is missing.
    """
    name = name or str(path)
    if path.is_file():
        return _stated(receipt.read(path), name)
    for needed in (names.ADDRESS, names.ENVIRONMENT, names.STEP_ROWS):
        if not (path / needed).is_file():
            raise Refused(f"{path / needed}: missing; a run directory with a trace is wanted (trace.level: step)")
    steps = chain.rows(path / names.STEP_ROWS, chain.STEP)
    tensors, columns = path / names.TENSOR_ROWS, ()
    if tensors.is_file():
        columns = tuple(dict.fromkeys(read_record(path, names.TENSOR_COLUMNS)))
    return Side(
        name,
        fields(read_record(path, names.ADDRESS)["preimage"]),
        flatten(read_record(path, names.ENVIRONMENT)["preimage"]),
        receipt.resumes(path),
        steps["link"][-1].tobytes().hex() if len(steps) else None,
        steps,
        chain.rows(tensors, np.dtype([(name, "<u8") for name in columns])) if columns else None,
        columns,
    )


def _stated(whole: receipt.Receipt, name: str) -> Side:
    stated = whole.stated
    address, environment = fields(stated["preimage"]), flatten(stated["environment"]["preimage"])
    resumed = tuple(stated["informational"]["resumed"])
    return Side(name, address, environment, resumed, stated["trace"], np.empty(0, chain.STEP), None, ())


def first_place(one: Side, other: Side) -> Place | None:
    """The first difference of two traces; None if there is none, as far as both go."""
    step = chain.first_difference(one.steps, other.steps)
    phases = [] if step is None else _phases(one.steps[step], other.steps[step])
    by_phase: dict[str, list[str]] = {}
    columns = [column for column in one.columns if column in other.columns]
    if one.tensors is not None and other.tensors is not None:
        finer = chain.first_difference(one.tensors, other.tensors)
        if finer is not None and (step is None or finer <= step):
            if step is None or finer < step:  # the weights of each step, say, that the other trace does not have
                step, phases = finer, []
            these, those = one.tensors[step], other.tensors[step]
            for name in columns:
                if these[name] != those[name]:
                    by_phase.setdefault(name.split()[0], []).append(name.split(" ", 1)[1])
    if step is None:
        return None
    phase = min([*phases, *by_phase], key=PHASES.index, default="weights")
    tensors = by_phase.get(phase, [])
    if phase == "gradient":
        tensors.reverse()  # the backward pass comes by the last one first
    return Place(step, phase, tuple(tensors), sum(name.startswith(f"{phase} ") for name in columns))


def _phases(these: Any, those: Any) -> list[str]:
    both = these["flags"] & those["flags"] & chain.HAS_WEIGHTS
    return [
        name
        for name in ("batch", "loss", "gradient", "weights")
        if these[name] != those[name] and (name != "weights" or both)
    ]


# Causes of a first difference in a phase, likeliest first: phases, the pattern of a field, the sentence that says why.
ANY = ".*"
CAUSES = (
    (ANY, r"seed", "every random number is derived from the seed"),
    ("batch", r"data\.|config\.data\.", "the batch is made of other data"),
    ("batch", r"code\.(data|prepare)\.py|code\.repro/training/(sampling|order|seeds)", "this code makes the batches"),
    ("batch", r"config\.parallel\.|config\.train\.epochs", "it decides which samples a step sees"),
    ("gradient", r"config\.parallel\.|world_size|code\.repro/training/parallel", "it decides how gradients are summed"),
    ("output|loss|gradient", r"config\.model\.", "it is another network"),
    ("output|loss|gradient", r"code\.model\.py", "this code is the network"),
    ("weights|optimizer", r"config\.train\.", "the optimizer's step depends on it"),
    ("weights|optimizer", r"code\.train\.py", "this code holds the optimizer and its settings"),
    ("output|loss|gradient|weights|optimizer", r"config\.compute\.", "it is another arithmetic"),
    (ANY, r"switches\..*", "{why}"),
    (ANY, r"threads|variables\.(OMP|MKL)_NUM_THREADS", "the thread count decides how sums are split"),
    (ANY, r"cpu\.|cuda\.|device", "other hardware, or another instruction set, rounds in another order"),
    (ANY, r"torch\.|numpy|python|image|lock\.", "other libraries compute with other kernels"),
    (ANY, r"variables\..*", "libraries read this variable"),
    (ANY, r"code\..*", "the code differs"),
    (ANY, r"config\..*", "other numbers were asked for"),
)
# The conclusion for each phase if nothing that is recorded differs.
UNRECORDED = {
    "batch": "seed, data and code are the same, so the batch was made with randomness that nobody seeds: a generator "
    "of its own, the time, os.urandom, an unordered set, or a worker that keeps state",
    "output": "the batch is the same, so the forward pass draws from a generator that is not seeded per shard, or an "
    "operation in it has no fixed order, or memory or hardware failed",
    "gradient": "batch and loss are the same, so an operation in the backward pass has no fixed order, or a bit "
    "flipped in memory or hardware: integrity.recompute_every finds hardware that computes wrong",
    "weights": "the gradients are the same, so the optimizer's state or the weights were changed: by memory or "
    "hardware, or by what code does outside the step",
}
UNRECORDED[ANYWHERE] = "nothing that is recorded differs: compare the run directories, whose traces tell the phase"
UNRECORDED |= {"loss": UNRECORDED["output"], "optimizer": UNRECORDED["weights"]}


def causes(place: Place, one: Side, other: Side) -> list[str]:
    """The likely causes of the difference, likeliest first, each with the sentence that says why."""
    found = differences(one.address, other.address) + differences(one.environment, other.environment)
    ranked = sorted(((_rank(place.phase, difference), difference) for difference in found), key=lambda pair: pair[0])
    sentences = [f"{d.field}: {_short(d.one)} | {_short(d.other)}: {_why(rank, d)}" for rank, d in ranked]
    for side in (one, other):
        if place.step in side.resumed and place.phase != ANYWHERE:
            sentences.insert(0, f"{side.name} was resumed just before step {place.step}: it went on from another state")
    return sentences or [UNRECORDED[place.phase]]


def reason(phase: str, field: str) -> str:
    """Why a field may be the cause of a first difference in a phase, or ANYWHERE."""
    difference = Difference(field, None, None)
    return _why(_rank(phase, difference), difference)


def _rank(phase: str, difference: Difference) -> int:
    fits = (
        rank
        for rank, (phases, field, _) in enumerate(CAUSES)
        if (phase == ANYWHERE or re.fullmatch(phases, phase)) and re.match(field, difference.field)
    )
    return next(fits, len(CAUSES))


def _why(rank: int, difference: Difference) -> str:
    sentence = CAUSES[rank][2] if rank < len(CAUSES) else "it differs"
    reasons = {f"switches.{switch.name}": switch.why for switch in SWITCHES}
    return sentence.format(why=reasons.get(difference.field, "a switch differs"))


def _short(value: Any, most: int = 40) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def report(one: Side, other: Side) -> tuple[bool, list[str]]:
    """Whether the runs are equal, and the lines that say so: the verdict first."""
    if not len(one.steps) or not len(other.steps):
        return _roots(one, other)
    place = first_place(one, other)
    lengths = len(one.steps), len(other.steps)
    if place:
        header = f"DIFFERENT: {one.name} and {other.name} first differ at {place}"
        before = f"equal before: {place.step} steps" if place.step else "no step before it"
        return False, [header, before, "causes, likeliest first:", *(f"  {text}" for text in causes(place, one, other))]
    if lengths[0] != lengths[1]:
        verdict = f"EQUAL for {min(lengths)} steps: {one.name} has {lengths[0]}, {other.name} has {lengths[1]}"
        return False, [verdict]
    return True, [f"EQUAL: {lengths[0]} steps, trace root {one.root}"]


def _roots(one: Side, other: Side) -> tuple[bool, list[str]]:
    """The verdict where a side has no steps: it is a receipt alone, or a run that ended before its first step."""
    if one.root and one.root == other.root:
        return True, [f"EQUAL: trace root {one.root}"]
    header = f"DIFFERENT: {one.name} has trace root {one.root}, {other.name} has {other.root}"
    found = causes(Place(0, ANYWHERE, (), 0), one, other)
    return False, [
        header,
        "both run directories are needed to find the step",
        "causes, likeliest first:",
        *(f"  {text}" for text in found),
    ]
