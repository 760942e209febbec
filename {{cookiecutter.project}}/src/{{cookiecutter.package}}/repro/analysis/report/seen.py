"""What a report shows of a run, finished or not: read from its run directory, or from its receipt alone."""

import csv
import json
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...address.address import fields
from ...base.files import REMEDY
from ...base.text import flatten
from ...core.errors import Failure, Refused
from ...record import names, receipt
from ...record.reading import read_record
from ...record.receipt import Receipt
from .. import beside, diff
from ..statistics import Numbers

LARGEST = 2**53  # whole numbers below are exact in float64


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


@dataclass(frozen=True)
class Seen:
    """A run as it is found.

    Attributes:
        name: as the report calls it.
        path: its run directory; its receipt, where that was given alone.
        facts: what run.json holds; empty where there is none, as in a download from MLflow.
        address: what address.json holds, or the receipt states of it.
        environment: likewise.
        doubts: what is wrong with its records, a sentence of each.
        curves: by metric.
    """

    name: str
    path: Path
    facts: Mapping[str, Any]
    address: Mapping[str, Any]
    environment: Mapping[str, Any]
    receipt: Receipt | None
    doubts: tuple[str, ...]
    metrics: Mapping[str, float]
    curves: Mapping[str, Curve]
    ranks: tuple[Rank, ...] = field(default=())

    @cached_property
    def side(self) -> diff.Side | None:
        """Its records and its trace, as `repro diff` compares them; None where they do not suffice for that."""
        try:
            return replace(diff.load(self.path, self.name), doubts=self.doubts)
        except Failure:
            return None

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
    def weights(self) -> str | None:
        """The SHA-256 of the final weights."""
        return self.receipt.weights if self.receipt else None

    @property
    def root(self) -> str | None:
        """The trace root: of the steps so far, where the run is unfinished."""
        return self.side.root if self.side else self.receipt.stated["trace"] if self.receipt else None

    @property
    def addressed(self) -> Mapping[str, Any]:
        """The fields of the content address."""
        return fields(self.address["preimage"]) if "preimage" in self.address else {}

    @property
    def done(self) -> int:
        """How many steps it is known to have made."""
        logged = max((int(curve.steps[-1]) + 1 for curve in self.curves.values() if len(curve.steps)), default=0)
        return len(self.side.steps) if self.side and len(self.side.steps) else int(self.metrics.get("steps", logged))

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


def look(path: Path, name: str) -> Seen:
    """The run in a run directory, or that of a receipt.

    Raises:
        Refused: no run was recorded there, or a file holds what no run writes.
    """
    if path.is_file():
        return _stated(receipt.read(path), name)
    facts = read_record(path, names.RUN) if (path / names.RUN).is_file() else {}
    held, doubts = beside.held(path)
    if not (facts or held or doubts or (path / names.ADDRESS).is_file()):
        raise Refused(f"{name}: no record of a run seen, a run directory, a receipt or an MLflow run id wanted")
    read = {each: read_record(path, each) for each in (names.ADDRESS, names.ENVIRONMENT) if (path / each).is_file()}
    address = read.get(names.ADDRESS) or (_of(held) if held else {})
    environment = read.get(names.ENVIRONMENT) or (_environment(held) if held else {})
    metrics_there = read_record(path, names.METRICS) if (path / names.METRICS).is_file() else {}
    metrics = _numbers(metrics_there or (held.stated["metrics"] if held else {}), path / names.METRICS)
    logged, table = path / names.METRIC_ROWS, path / names.CURVES
    curves = _of_rows(logged) if logged.is_file() else _of_table(table) if table.is_file() else {}
    files = sorted((path / names.TRACE).glob("rank*.jsonl"))
    ranks = tuple(rank for file in files if (rank := _rank(file)))
    return Seen(name, path, facts, address, environment, held, doubts, metrics, curves, ranks)


def _stated(held: Receipt, name: str) -> Seen:
    """The run of a receipt alone."""
    return Seen(
        name, held.path, {}, _of(held), _environment(held), held, (), _numbers(held.stated["metrics"], held.path), {}
    )


def _of(held: Receipt) -> dict[str, Any]:
    return {name: held.stated[name] for name in ("address", "parts", "preimage")}


def _environment(held: Receipt) -> dict[str, Any]:
    return {**held.stated["environment"], "informational": held.stated["informational"]}


def _numbers(metrics: Mapping[str, Any], path: Path) -> dict[str, float]:
    """Metrics as a receipt or metrics.json holds them; a receipt has words for infinities and NaN."""
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (ValueError, OverflowError):
        raise Refused(f"{path.name}: a metric that is no number, or too large for one. {REMEDY}") from None


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
            raise Refused(f"{path.name}, line {number}: no row of metrics. {REMEDY}") from None
    return {name: Curve(np.array(steps), np.array(values)) for name, (steps, values) in found.items()}


def _of_table(path: Path) -> dict[str, Curve]:
    """The curves in steps.csv, which MLflow keeps of a run."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            head, *rows = [*csv.reader(file)] or [["step"]]
        columns = {name: [(row[0], row[place]) for row in rows if row[place]] for place, name in enumerate(head)}
        pairs = {name: np.array(column, float).reshape(-1, 2) for name, column in columns.items() if name != "step"}
    except (ValueError, IndexError, csv.Error) as error:
        raise Refused(f"{path.name}: no table of metrics: {error}. {REMEDY}") from None
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
