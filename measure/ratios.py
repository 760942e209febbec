"""Ratios of what ways took, with intervals; the table's rows, written and read; and when a ratio has grown."""

import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rounds import ONE_BATCH, PINNED, PLAIN, ROOT, WAYS, WORKLOADS, Taken, harness

WORSE = 1.15  # so many times the committed ratio is a regression
HEAD = """| workload | processes | way | ms per step | beside plain | beside plain with flags | memory, MiB |
|---|---|---|---|---|---|---|"""
SHARES = {  # a part of a step -> the way that has it, and the same way without it
    "micro-batches": (PLAIN, ONE_BATCH),
    "flags": (PINNED, PLAIN),
    "trace": ("step", "off"),
    "the rest": ("off", PINNED),
    "all": ("step", ONE_BATCH),
}
SHARES_HEAD = f"""| workload | processes | {" | ".join(SHARES)} |
|---|---|{"---|" * len(SHARES)}
| key that gives it back | | `parallel.micro_batches` | `determinism.cpu: native` | `trace.level: off` \
| none | |"""
ROW = re.compile(r"\| ([^|]+) \| (\d+) \| ([^|]+) \| [\d.]+ \| ([\d.]+) \(.*")

Cell = tuple[str, int, str]  # workload, processes, way: names of the tables in rounds.py


STATISTICS = ROOT / "samebits" / "analysis" / "statistics.py"  # those of generated projects
median_interval = runpy.run_path(str(STATISTICS))["median_interval"]
FEWEST = next(count for count in range(1, 20) if median_interval(np.zeros(count)))  # rounds that make an interval


@dataclass(frozen=True)
class Ratio:
    """The median over the rounds, and an interval that holds the true median with a chance of 95 % at least."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return harness.spread(self.low, self.middle, self.high)


def ratio(one: Sequence[float], other: Sequence[float]) -> Ratio:
    """Of the two, round by round.

    Raises:
        ValueError: too few rounds for an interval, or a number that is not finite and above zero.
    """
    both = np.array([one, other], dtype=np.float64)
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError("seconds of a step: a number that is not finite and above zero")
    found = median_interval(both[0] / both[1])
    if found is None:
        raise ValueError(f"{len(one)} rounds seen, {FEWEST} or more wanted for an interval")
    return Ratio(float(np.median(both[0] / both[1])), *found)


def beside(one: Sequence[float], other: Sequence[float]) -> str:
    """The cell of a ratio; what stands beside itself has none."""
    return "1" if one is other else str(ratio(one, other))


def rows(workload: str, ranks: int, taken: dict[str, Taken]) -> list[str]:
    """The lines of the table on one workload and number of processes."""
    lines = []
    for name, one in taken.items():
        ratios = (beside(one.seconds, taken[other].seconds) if other in taken else "" for other in (PLAIN, PINNED))
        cells = (
            WORKLOADS[workload].title, str(ranks), WAYS[name].title, f"{1000 * np.median(one.seconds):.1f}",
            *ratios, f"{one.memory / 2**20:.0f}",
        )  # fmt: skip
        lines.append(harness.row(*cells))
    return lines


def shares(workload: str, ranks: int, taken: dict[str, Taken]) -> list[str]:
    """Return the line with the ratio of each part, or no line if no part was measured.

    In each round, the ratio of the last part is the product of the ratios of all others.
    """
    cells = []
    for over, under in SHARES.values():
        is_measured = taken.keys() >= {over, under}
        cells.append(str(ratio(taken[over].seconds, taken[under].seconds)) if is_measured else "")
    return [harness.row(WORKLOADS[workload].title, str(ranks), *cells)] if any(cells) else []


def read(text: str) -> dict[Cell, float]:
    """The ratios beside the plain script that a document holds."""
    workloads = {workload.title: name for name, workload in WORKLOADS.items()}
    ways = {way.title: name for name, way in WAYS.items()}
    found = [match for line in text.splitlines() if (match := ROW.fullmatch(line))]
    return {(workloads[line[1]], int(line[2]), ways[line[3]]): float(line[4]) for line in found}


def has_grown(fresh: Ratio, committed: float) -> bool:
    """Whether all of the fresh interval lies above the committed ratio by more than may be noise."""
    return fresh.low > WORSE * committed
