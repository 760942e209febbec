"""Controls of `samebits verify`: trainings that must differ. Where one does not, all that is equal proves nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..address.manifest import sha256_file
from ..base.files import read_json
from ..base.project import Project
from ..core.errors import Preempted, RunError
from ..record.names import RECEIPT, WEIGHTS
from ..start import trainings
from .verify import FOLDER, NOTHING, ONCE, Row, Start, Way, length_of, said_by, watched

DIFFERS = "DIFFERS, as it must"
CONSTANT = "such as torch.manual_seed(0)"
SEED, TAKEN = "another seed", "resumed with a weight zeroed"
STOPPED = (0, Preempted.exit_code)
UNUSED = {  # what the seed is for -> what is said where it decides nothing
    "initial weights": "not used here: they do not depend on it, as where they are loaded",
    "order": "not used here: the order of the samples does not depend on it",
    "augmentation": "not used here: no item draws a number",
    "dropout": "not used here: the model draws no number",
}


def another_seed(project: Project, common: Mapping[str, Any], seed: int, start: Start) -> Iterator[Row]:
    """What another seed changes in the first step, each use of it by itself."""
    seen = []
    for number in (seed, seed ^ 1):
        report = project.root / FOLDER / f"seed-{number}.json"
        way = Way(report.stem, module=trainings.CONTROLLED, given=("seen", str(report)))
        code = _ended(way, {**common, "seed": number, "trace.level": "off", "trace.values": 0}, start)
        if code not in STOPPED or not report.is_file():
            yield Row(SEED, said_by(project, way, code), control=True)
            return
        seen.append(read_json(report))
    for use, unused in UNUSED.items():
        one, other = (each.get(use, {"value": None, "drawn": [], "left": {}}) for each in seen)
        yield Row(f"{SEED}: {use}", _reached(one, other) or unused, control=True)


def _reached(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Whether the seed reaches what was seen with two of them; nothing where nobody asks it for a number."""
    if one["value"] != other["value"]:
        return DIFFERS
    drawn = sorted({*one["drawn"]} & {*other["drawn"]})
    if constant := [name for name in drawn if one["left"][name] == other["left"][name] and name != "cuda"]:
        return f"EQUAL: two seeds leave {constant[0]}'s generator in one state: your code seeds it, {CONSTANT}"
    return DIFFERS if drawn and one["value"] is None else ""


def weight_zeroed(project: Project, common: Mapping[str, Any], seed: int, start: Start) -> Iterator[Row]:
    """A run that goes on from a state of which a tensor was zeroed: it is refused, or ends with other weights."""
    out = project.root / ONCE.folder
    steps, _ = length_of(out)
    way = Way(TAKEN)
    code = _ended(way, {**common, "trace.values": max(0, steps // 3 - 1)}, start)
    if code != Preempted.exit_code:
        yield Row(TAKEN, said_by(project, way, code), control=True)
        return
    way = replace(way, module=trainings.CONTROLLED, given=("taken", ""))
    code = _ended(way, common, start)
    if code == RunError.exit_code and "the resumed run is not the same run" in said_by(project, way, code):
        yield Row(TAKEN, f"{DIFFERS}: refused", control=True)
    elif code:
        yield Row(TAKEN, said_by(project, way, code), control=True)
    else:
        one, other = (sha256_file(each / WEIGHTS) for each in (out, project.root / way.folder))
        verdict = (
            DIFFERS if one != other else "EQUAL: a resumed run ends with equal weights from a state that is broken"
        )
        yield Row(TAKEN, verdict, other, control=True)


def _ended(way: Way, settings: Mapping[str, Any], start: Start) -> int | None:
    return watched(partial(start, way, settings))[1]


CONTROLS: Mapping[str, Callable[[Project, Mapping[str, Any], int, Start], Iterator[Row]]] = {
    SEED: another_seed,
    TAKEN: weight_zeroed,
}


def chosen_controls(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The controls of these names, all where there are none, and the names that are of no control."""
    return [name for name in CONTROLS if not names or name in names], [name for name in names if name not in CONTROLS]


def conclusion(rows: Sequence[Row], compared: bool) -> tuple[bool, list[str]]:
    """Whether all holds, and the last lines. Where ways were to be `compared`, one at least has to be tried."""
    tried = [row.verdict for row in rows if not row.control and not row.verdict.startswith("not tried")]
    equal = all(verdict == "EQUAL" for verdict in tried)
    holds = equal and (len(tried) > 1 or not compared)
    said = "EQUAL" if holds else "NOT COMPARED" if equal else "DIFFERS"
    lines = [f"{said}: {tried.count('EQUAL')} of {len(tried)} trainings"]
    if odd := [row.name for row in rows if row.control and not row.verdict.startswith((DIFFERS, "not used"))]:
        lines.append(f"does not differ, as it must: {'; '.join(odd)}. Mend it first: no EQUAL proves much without it")
    return holds and not odd, lines


def try_controls(
    project: Project,
    seed: int,
    start: Start,
    settings: Mapping[str, Any] = NOTHING,
    chosen: Sequence[str] = (),
) -> Iterator[Row]:
    """A row for each control, after `verify.train_in_all_ways` with these keys."""
    common = {"tracking.enabled": False, "trace.level": "step", "loader.workers": 0, **settings}
    trained = (project.root / ONCE.folder / RECEIPT).is_file()
    for control in chosen if trained else ():
        yield from CONTROLS[control](project, common, seed, start)
