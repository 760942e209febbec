"""A run as it lies on the disk, finished or not: what its run directory holds, or what its receipt alone states.

Whoever asks about recorded runs asks it. A run itself writes and reads its records elsewhere, and never needs this.
"""

import csv
import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..address.address import fields
from ..address.manifest import sha256_file
from ..base.files import REMEDY, read_json
from ..base.text import differences, flatten, named, some
from ..core.errors import RunError, UserError
from . import chains, names, started
from .chain import STEP
from .names import ADDRESS, ENVIRONMENT, METRICS, RECEIPT, RUN, STEP_ROWS, WEIGHTS
from .reading import read_record
from .receipt import Receipt, read
from .record import ENDS, ends

LARGEST = 2**53  # whole numbers below are exact in float64
Numbers = np.ndarray[Any, np.dtype[np.float64]]
Rows = np.ndarray[Any, Any]
_NO_STEPS = np.empty(0, np.dtype([*((name, STEP[name]) for name in STEP.names or ()), ("link", "V24")]))


def comparable(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Metrics in words that are equal where their bits are: NaN is equal to no number, and a receipt has words for it.

    Raises:
        ValueError: one is no number.
    """
    return {name: repr(float(value)) for name, value in metrics.items()}


def other_metrics(one: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> str:
    """The metrics that differ in any bit, in words; `here` and `there` say which value is whose. Empty for none."""
    return some([named([each], here, there) for each in differences(comparable(one), comparable(other))])


# Keys of the environment that records of earlier releases lack, with the values that their runs had.
LATER: dict[str, Any] = {"determinism.tf32": False, "environment.variables": []}
PARTS = "address", "parts", "preimage", "core_files"  # of address.json and of a receipt, the last one not always
# A file -> whether it is the one of which the receipt states something.
FILES: dict[str, Callable[[Path, Receipt], bool]] = {
    WEIGHTS: lambda path, run: sha256_file(path) == run.weights,
    METRICS: lambda path, run: comparable(read_json(path)) == comparable(run.stated["metrics"]),
    STEP_ROWS: lambda path, run: chains.root(path, STEP.itemsize) == run.stated["trace"],
    ADDRESS: lambda path, run: read_json(path) == _parts(run),
    ENVIRONMENT: lambda path, run: read_json(path).items() >= run.stated["environment"].items(),
    RUN: lambda path, run: _begun(read_json(path)) == _begun(run.stated | run.stated["informational"]),
}


def _begun(facts: dict[str, Any]) -> dict[str, Any]:
    """What run.json and a receipt both hold."""
    begun = {name: facts[name] for name in ("config", "code", "started")}
    return begun | {"resumed": facts.get("resumed", [])} | {name: facts.get(name) for name in ENDS}


def _parts(run: Receipt) -> dict[str, Any]:
    """Return what address.json contains, from a receipt."""
    return {name: run.stated[name] for name in PARTS if name in run.stated}


def stated_files(run: Receipt) -> list[str]:
    """The files of which a receipt states something; where a run has no trace, none of that."""
    return [name for name in FILES if name != STEP_ROWS or run.stated["trace"]]


def is_stated(run: Receipt, name: str) -> bool:
    """Whether the file of this name beside a receipt is the one that it states; not, where there is none."""
    try:
        return FILES[name](run.path.parent / name, run)
    # missing, or not what it once was
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, UserError):
        return False


@dataclass(frozen=True)
class Curve:
    """A metric over steps: two vectors of float64 of one length; a value may be NaN or infinite."""

    steps: Numbers
    values: Numbers


@dataclass(frozen=True)
class Rank:
    """What a rank noted of each of its steps.

    Attributes:
        steps: whole numbers, rising.
        seconds: by phase, a vector as long as `steps`.
        memory: the most that it held, in bytes.
        unread: lines of its file that cannot be read, as a crash leaves one.
    """

    number: int
    host: str
    steps: Numbers
    seconds: Mapping[str, Numbers]
    memory: int
    unread: int


class RunView:
    """A run, each part of which is read when it is first asked for, once.

    What a run directory lacks is what its receipt states; a part is empty where nobody knows it. A file that holds what
    no run writes is refused (`UserError`) by whoever asks for its part.

    Attributes:
        path: its run directory; its receipt, where that was given alone: then the files beside it are not looked at.
        name: as others call it.
        every_row: whether `doubts` reads the whole trace, and not its last row alone.
    """

    def __init__(self, path: Path, name: str = "", every_row: bool = True) -> None:
        self.path, self.name, self.every_row = path, name or str(path), every_row

    def holds(self, name: str) -> bool:
        """Whether a file lies in the run directory."""
        return (self.path / name).is_file()

    @cached_property
    def _found(self) -> Receipt | RunError | None:
        """The receipt, or what is wrong with that of a directory, whose other records still tell of the run."""
        alone = self.path.is_file()
        try:
            return read(self.path) if alone or self.holds(RECEIPT) else None
        except RunError as failure:
            if alone:
                raise
            return failure

    @property
    def receipt(self) -> Receipt | None:
        """Its receipt; None where there is none, or where it was altered, as `doubts` tells.

        Raises:
            RunError: it was altered, and is alone.
        """
        return self._found if isinstance(self._found, Receipt) else None

    @property
    def required(self) -> Receipt:
        """Its receipt.

        Raises:
            UserError: there is none.
            RunError: it was altered.
        """
        if isinstance(self._found, RunError):
            raise self._found
        return self._found or read(self.path)  # which says what is missing

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """What is wrong with its records, a sentence of each."""
        if isinstance(self._found, RunError):
            return (str(self._found).replace(f"{self.path}/", ""),)
        run = self._found
        if not run or self.path.is_file():
            return ()
        compared = [name for name in FILES if self.holds(name) and (self.every_row or name != STEP_ROWS)]
        others = [name for name in compared if not is_stated(run, name)]
        doubts = [f"{some(others)}: not as the receipt states: altered, or of another run"] if others else []
        if not self.every_row and self.root != run.stated["trace"]:
            doubts.append(f"{STEP_ROWS}: not as the receipt states: altered, cut, or of another run")
        return tuple(doubts)

    def require_record(self) -> None:
        """Refuse a folder in which nothing of a run was recorded."""
        if not (self.facts or self.receipt or self.doubts or self.holds(ADDRESS)):
            raise UserError(
                f"{self.name}: no record of a run seen, a run directory, a receipt or an MLflow run id wanted"
            )

    def require_comparable(self) -> None:
        """Refuse a run of which there is too little to compare it with another one."""
        if missing := [name for name, held in ((ADDRESS, self.address), (ENVIRONMENT, self.environment)) if not held]:
            raise UserError(f"{self.path / missing[0]}: missing; a run directory, or a receipt, is wanted")
        if not (len(self.steps) or self.receipt or self.doubts):
            raise UserError(
                f"{self.path}: neither a step of a trace (trace.level: step) nor a receipt seen: nothing to compare"
            )
        _ = self.addressed, self.numeric, self.resumed, self.tensors  # which are refused here if they are damaged

    @cached_property
    def is_comparable(self) -> bool:
        """Whether its records suffice to compare it with another one."""
        try:
            self.require_comparable()
        except RunError:
            return False
        return True

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What run.json holds; empty where there is none, as in a download from MLflow."""
        return dict(read_record(self.path, RUN)) if self.holds(RUN) else {}

    @cached_property
    def address(self) -> Mapping[str, Any]:
        """What address.json holds."""
        if self.holds(ADDRESS):
            return dict(read_record(self.path, ADDRESS))
        return _parts(self.receipt) if self.receipt else {}

    @cached_property
    def addressed(self) -> Mapping[str, Any]:
        """The fields of the content address."""
        return fields(self.address["preimage"]) if "preimage" in self.address else {}

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """What environment.json holds."""
        if self.holds(ENVIRONMENT):
            return dict(read_record(self.path, ENVIRONMENT))
        stated = self.receipt.stated if self.receipt else {}
        return {**stated["environment"], "informational": stated["informational"]} if stated else {}

    @cached_property
    def numeric(self) -> Mapping[str, Any]:
        """The fields of the numeric environment."""
        return flatten(self.environment.get("preimage", {}))

    @cached_property
    def resumed(self) -> tuple[int, ...]:
        """After how many steps it went on, each time."""
        stated = self.receipt.stated["informational"] if self.receipt else {}
        return tuple((self.facts or stated).get("resumed", ()))

    @property
    def started_from(self) -> str:
        """In words, the run with whose weights it began; empty where it drew its own."""
        return started.words(self.config)

    @property
    def ends(self) -> dict[str, str]:
        """In words, that it ended early, or not with the weights after its last step."""
        return ends(self.facts or (self.receipt.stated if self.receipt else {}), self.done)

    @cached_property
    def steps(self) -> Rows:
        """The digests of each sum of each step so far (`STEP`), memory-mapped; none without a trace."""
        return chains.rows(self.path / STEP_ROWS, STEP) if self.holds(STEP_ROWS) else _NO_STEPS

    @property
    def traced(self) -> int:
        """How many steps its trace has."""
        return int(self.steps["step"][-1]) + 1 if len(self.steps) else 0

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of `tensors`."""
        there = self.holds(names.TENSOR_ROWS)
        return tuple(dict.fromkeys(read_record(self.path, names.TENSOR_COLUMNS))) if there else ()

    @cached_property
    def tensors(self) -> Rows | None:
        """The digests of each tensor in the same rows, memory-mapped; None where they were not traced."""
        held = np.dtype([(name, "<u8") for name in self.columns])
        return chains.rows(self.path / names.TENSOR_ROWS, held) if self.columns else None

    @cached_property
    def root(self) -> str | None:
        """The trace root: of the steps so far, where the run is unfinished."""
        if len(self.steps):
            return str(self.steps["link"][-1].tobytes().hex())
        return self.receipt.stated["trace"] if self.receipt else None

    @cached_property
    def weights(self) -> str | None:
        """The SHA-256 of the final weights."""
        return self.receipt.weights if self.receipt else None

    @cached_property
    def outcome(self) -> Mapping[str, str]:
        """The final metrics that the receipt states, in words that are equal where their bits are."""
        return comparable(self.receipt.stated["metrics"]) if self.receipt else {}

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The final metrics, infinities and NaN among them."""
        there = read_record(self.path, METRICS) if self.holds(METRICS) else {}
        return _numbers(there or (self.receipt.stated["metrics"] if self.receipt else {}), self.path / METRICS)

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        """What its steps logged, by metric."""
        if self.holds(names.METRIC_ROWS):
            return _of_rows(self.path / names.METRIC_ROWS)
        return _of_table(self.path / names.CURVES) if self.holds(names.CURVES) else {}

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """What each rank noted."""
        files = sorted((self.path / names.TRACE).glob("rank*.jsonl"))
        return tuple(rank for file in files if (rank := _rank(file)))

    @property
    def config(self) -> Mapping[str, Any]:
        """All keys that the run was given; of an unfinished one in MLflow, those of its content address."""
        stated = self.receipt.stated["config"] if self.receipt else None
        preimage = self.address.get("preimage", {})
        return self.facts.get("config") or stated or flatten(preimage.get("config", {}))

    @property
    def code(self) -> Mapping[str, Any]:
        """Its commit and the SHA-256 of its patch."""
        return self.facts.get("code") or (self.receipt.stated["code"] if self.receipt else {})

    @property
    def status(self) -> str:
        """How it went, in MLflow's word."""
        return str(self.facts.get("status") or ("FINISHED" if self.receipt else "unknown"))

    @property
    def done(self) -> int:
        """How many steps it is known to have made."""
        logged = max((int(curve.steps[-1]) + 1 for curve in self.curves.values() if len(curve.steps)), default=0)
        return self.traced or int(self.metrics.get("steps", logged))

    @property
    def seconds(self) -> float | None:
        """From its start to its end, pauses before a resume included."""
        milliseconds = self.facts["ended"] - self.facts["started"] if self.facts.get("ended") else None
        if milliseconds is not None:
            return milliseconds / 1000 if abs(milliseconds) < LARGEST else None
        stated = self.receipt.stated["informational"].get("seconds") if self.receipt else None
        return float(stated) if isinstance(stated, int | float) and abs(stated) < LARGEST else None

    @property
    def memory(self) -> int | None:
        """The most that any rank held, in bytes."""
        return max((rank.memory for rank in self.ranks), default=None)


def _numbers(metrics: Mapping[str, Any], path: Path) -> dict[str, float]:
    """Metrics as a receipt or metrics.json holds them; a receipt has words for infinities and NaN."""
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (ValueError, OverflowError):
        raise UserError(f"{path.name}: a metric that is no number, or too large for one. {REMEDY}") from None


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The number and the value of each whole line; None for one that is no JSON. One line at a time: many may come."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):  # not one that is still being written
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError):
                    yield number, None


def _counted(value: Any) -> int:
    """A whole number of steps or bytes.

    Raises:
        ValueError: it is none that a run counts to.
    """
    if not isinstance(value, int) or not 0 <= value < LARGEST:
        raise ValueError
    return value


def _of_rows(path: Path) -> dict[str, Curve]:
    """The curves in metrics.jsonl."""
    found: dict[str, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
    for number, row in _rows(path):
        try:
            step = _counted(row["step"])
            for name, value in row["metrics"].items():
                found[name][0].append(step)
                found[name][1].append(float(value))
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            raise UserError(f"{path.name}, line {number}: no row of metrics. {REMEDY}") from None
    return {name: Curve(np.array(steps), np.array(values)) for name, (steps, values) in found.items()}


def _of_table(path: Path) -> dict[str, Curve]:
    """The curves in steps.csv, which MLflow keeps of a run."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            head, *rows = [*csv.reader(file)] or [["step"]]
        columns = {name: [(row[0], row[place]) for row in rows if row[place]] for place, name in enumerate(head)}
        pairs = {name: np.array(column, float).reshape(-1, 2) for name, column in columns.items() if name != "step"}
    except (ValueError, IndexError, csv.Error) as error:
        raise UserError(f"{path.name}: no table of metrics: {error}. {REMEDY}") from None
    return {name: Curve(pair[:, 0], pair[:, 1]) for name, pair in pairs.items() if len(pair)}


def _rank(path: Path) -> Rank | None:
    """What a rank noted; None where it noted nothing. A step that was made again counts once, as it was made last."""
    steps, columns, unread = array("q"), defaultdict[str, "array[float]"](lambda: array("d")), 0
    number, host, memory = 0, "", 0
    for _, row in _rows(path):
        try:
            seconds = {str(phase): float(value) for phase, value in row["seconds"].items()}
            step, number, host = _counted(row["step"]), _counted(row["rank"]), str(row["host"])
            memory = max(memory, _counted(row["memory"]))
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            unread += 1  # a crash tears a line, and the run goes on behind it
            continue
        for phase in dict.fromkeys([*columns, *seconds]):
            missing = len(steps) - len(columns[phase])
            columns[phase].extend([np.nan] * missing + [seconds.get(phase, np.nan)])
        steps.append(step)
    if not steps:
        return None
    kept, places = np.unique(np.array(steps)[::-1], return_index=True)
    last = len(steps) - 1 - places
    ordered = {phase: np.array(values)[last] for phase, values in columns.items()}
    return Rank(number, host, kept, ordered, memory, unread)
