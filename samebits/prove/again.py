"""A part of a run is trained again, from the state that the run had, and compared with what the run has recorded."""

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..address.manifest import sha256_file
from ..base.files import read_json, write_json
from ..checkpoint import checkpoint
from ..record import chains
from ..record.chain import LINK, STEP, WORDS, rows_of
from ..record.names import ADDRESS, CHECKPOINTS, ENVIRONMENT, METRIC_ROWS, METRICS, RUN, STEP_ROWS, WEIGHTS
from ..record.reading import metric_rows, read_record
from ..record.removal import VALUES
from . import tensor
from .segments import Segment
from .tensor import END, STATE

SUMS, *PHASES = WORDS  # of a row of the trace, in the order in which a step has them
TRAINED = "training"  # of the segment
DISAGREE = re.compile(r"^step \d+: (.* differ), by the digests of:$", re.MULTILINE)  # as `guards.agreement` says it
NONE = "none"  # the weights of run.finish(), which it never came to


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as the run has recorded it.

    Attributes:
        step: counted from 0.
        phase: one of `WORDS`, `STATE`, `END`, or `TRAINED`.
        there, here: digests, in hex: the run's, and that of the part that was trained again.
        tensor: the first one that differs, or the first value of a state; empty where it is not known.
    """

    step: int
    phase: str
    there: str
    here: str
    tensor: str = ""

    def __str__(self) -> str:
        first = f"; first in {self.tensor}" if self.tensor else ""
        return f"step {self.step}: {self.phase}: {self.there} in the run, {self.here} when it was trained again{first}"


def interrupted(run: Path, out: Path, step: int) -> int:
    """Write into the new folder `out` the run as if it was killed at its newest checkpoint of at most `step` steps.

    Returns how many steps that one has; 0 where there is none. The trace and what was logged are left to the caller.
    """
    out.mkdir(parents=True)
    for name in (ADDRESS, ENVIRONMENT):
        shutil.copyfile(run / name, out / name)
    (out / METRIC_ROWS).touch()
    write_json(out / RUN, read_record(run, RUN) | {"status": "KILLED"})
    there = [path for path in checkpoint.found(run / CHECKPOINTS) if checkpoint.steps_of(path) <= step]
    for path in there[-1:]:
        shutil.copytree(path, out / CHECKPOINTS / path.name, copy_function=_link)
    return checkpoint.steps_of(there[-1]) if there else 0


def _link(source: str, target: str) -> None:
    """A second name for a file that nobody changes; a copy where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def cut(run: Path, out: Path, segment: Segment) -> None:
    """Write the trace of the run as far as the segment's first step; one that goes on from another run has no more."""
    (out / STEP_ROWS).parent.mkdir()
    rows = rows_of(run / STEP_ROWS, segment.first, segment.first)
    with (run / STEP_ROWS).open("rb") as file:
        (out / STEP_ROWS).write_bytes(file.read(rows * (STEP.itemsize + LINK)))


def failure(segment: Segment, said: str) -> Difference:
    """What differs where a segment cannot be trained to its end, by what it said."""
    return Difference(segment.first, TRAINED, "done", said)


def disagreement(segment: Segment, said: str) -> Difference | None:
    """What differs where a segment ended because its ranks hold other weights than each other, by all that it said."""
    found = DISAGREE.search(said)
    return failure(segment, found[1]) if found else None


def is_done(out: Path, segment: Segment) -> bool:
    """Whether the segment was trained to its end, or beyond, or the run has ended in it."""
    there = map(checkpoint.steps_of, checkpoint.found(out / CHECKPOINTS))
    return (out / METRICS).is_file() or any(steps >= segment.stop for steps in there)


def _state(out: Path, step: int) -> str | None:
    """The digest of the state after so many steps, if it was saved."""
    there = [path for path in checkpoint.found(out / CHECKPOINTS) if checkpoint.steps_of(path) == step]
    return read_json(there[0] / VALUES)["content"] if there else None


def difference(
    run: Path, out: Path, segment: Segment, states: Mapping[str, str], ends: bool = False
) -> Difference | None:
    """The first thing in which the segment, trained again in `out`, differs from the run; None where nothing does.

    `states` holds digests of the run's state, by the number of steps. A segment that `ends` the run has made what comes
    after the loop, too.
    """
    if (run / STEP_ROWS).is_file():
        there, here = (_rows(folder, segment) for folder in (run, out))
        for one, other in zip(there, here, strict=False):
            for phase in PHASES:
                if one[phase] != other[phase]:
                    return Difference(int(one["step"]), phase, f"{one[phase]:016x}", f"{other[phase]:016x}")
        if len(there) != len(here):
            return Difference(segment.stop - 1, SUMS, str(len(there)), str(len(here)))
    last = segment.stop - 1
    end = Difference(last, END, _weights(run), _weights(out))
    wanted, seen = states.get(str(segment.stop)) or _state(run, segment.stop), _state(out, segment.stop)
    if wanted and seen != wanted and not (ends and end.here == NONE):
        return _named(Difference(last, STATE, wanted[:16], str(seen)[:16]), run, out)
    return _named(end, run, out) if ends and end.there != end.here else None


def _named(found: Difference, run: Path, out: Path) -> Difference:
    """With the tensor, where both have what is compared."""
    there, here = (tensor.digests(folder, found.phase, found.step + 1) for folder in (run, out))
    return replace(found, tensor=tensor.first(found.phase, there, here))


def _weights(out: Path) -> str:
    """The first digits of the SHA-256 of the weights of a run that was finished."""
    return sha256_file(out / WEIGHTS)[:16] if (out / METRICS).is_file() else NONE


def _rows(folder: Path, segment: Segment) -> Any:
    rows = chains.rows(folder / STEP_ROWS, STEP)
    return rows[(rows["step"] >= segment.first) & (rows["step"] < segment.stop)]


def varying(run: Path, out: Path, segment: Segment) -> set[str]:
    """The names of logged numbers that are others than in the run, such as times. No receipt states them."""
    there, here = (_logged(folder, segment) for folder in (run, out))
    return {name for step, name in there if repr(there[step, name]) != repr(here[step, name])}


def _logged(folder: Path, segment: Segment) -> dict[tuple[int, str], list[float]]:
    found = defaultdict[tuple[int, str], list[float]](list)
    for row in metric_rows(folder):
        if segment.first <= row["step"] < segment.stop:
            for name, value in row["metrics"].items():
                found[row["step"], name].append(value)
    return found
