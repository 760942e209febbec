"""`samebits cost`: time and memory that each flag costs, measured on the owner's own training.

In each cycle one strict training is made, and one for each flag with it relaxed, in another order each time. A cycle
compares its own trainings alone, so that a machine that grows slower meets all of them alike.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from ..core import flags
from ..core.errors import UserError
from ..core.options import Determinism
from . import statistics
from .series import Made, Requested, Series
from .table import table

ALL, STRICT = "all", "strict"
ON_A_GPU = re.compile("cuda|cudnn|cublas|sdp", re.IGNORECASE)  # flags that change nothing on a CPU
WARM = 0.1  # of the steps: the first ones take longer
FEWEST_STEPS = 20
HEAD = ("relaxed", "strict ms", "relaxed ms", "time %", "interval", "memory %", "interval", "bits")


@dataclass(frozen=True)
class Cost:
    """What a flag costs.

    Attributes:
        strict, relaxed: medians, in seconds per step or in bytes.
        cost_pct: how much more the strict training takes, in percent of the relaxed one: the median over the cycles.
        low, high: an interval of `cost_pct` that all rows of a table hold together with a chance of 95 %.
        differs_from_zero: whether zero is outside of it.
    """

    strict: float
    relaxed: float
    cost_pct: float
    low: float | None
    high: float | None
    differs_from_zero: bool


@dataclass(frozen=True)
class Row:
    """What is relaxed, what it costs in seconds per step and in bytes, and whether the bits stay without it."""

    flag: str
    seconds: Cost
    memory: Cost
    same_bits: bool


def rows_here(determinism: Determinism, device: str, only: Sequence[str]) -> list[str]:
    """All flags together, then each that a run here holds and that can change something on its device.

    Raises:
        UserError: a flag is relaxed already, or one of `only` is not among them.
    """
    if determinism.relax:
        seen = ", ".join(determinism.relax)
        raise UserError(f"determinism.relax: [{seen}] seen, an empty list wanted: the cost of strict runs is measured")
    applicable = [flag.name for flag in flags.applicable(determinism)]
    names = [ALL, *(name for name in applicable if device != "cpu" or not ON_A_GPU.search(name))]
    if unknown := [name for name in only if name not in names]:
        raise UserError(f"--only {unknown[0]!r}: no flag that a run here holds; known: {', '.join(names)}")
    return [name for name in names if not only or name in only]


def fewest_cycles(rows: int) -> int:
    """The fewest cycles whose intervals exist for so many rows."""
    count = 1
    while statistics.median_interval(np.zeros(count), statistics.LEVEL / rows) is None:
        count += 1
    return count


def in_turn(names: Sequence[str], cycles: int) -> list[tuple[str, int]]:
    """Each name and `strict` with the number of each cycle. A cycle begins one name further on than the last one."""
    order = [STRICT, *names]
    turns = (order[cycle % len(order) :] + order[: cycle % len(order)] for cycle in range(cycles))
    return [(name, cycle) for cycle, turn in enumerate(turns) for name in turn]


def _requested(name: str, cycle: int) -> Requested:
    return Requested(name, {"determinism.relax": [] if name == STRICT else [name]}, number=cycle)


def step_seconds(made: Made) -> float:
    """The median time of a step of one training, without its first steps.

    Raises:
        UserError: it has too few steps for a median.
    """
    seconds = made.seconds()
    if len(seconds) < FEWEST_STEPS:
        raise UserError(
            f"a training of {len(seconds)} steps seen, {FEWEST_STEPS} wanted for a time per step: make it longer, "
            f"--set train.epochs=N, or verify.shorten in params.yaml"
        )
    return float(np.median(seconds[int(WARM * len(seconds)) :]))


def compared(strict: Sequence[float], relaxed: Sequence[float], rows: int) -> Cost:
    """The cost in a row of a table of so many; the two have a number for each cycle."""
    percent = 100 * (np.asarray(strict, float) / np.asarray(relaxed, float) - 1)
    low, high = statistics.median_interval(percent, statistics.LEVEL / rows) or (None, None)
    differs = low is not None and high is not None and not low <= 0 <= high
    return Cost(float(np.median(strict)), float(np.median(relaxed)), float(np.median(percent)), low, high, differs)


@dataclass(frozen=True)
class Costs:
    """The table of costs, and on what it was measured."""

    device: str
    cycles: int
    rows: list[Row]
    repeats: bool  # whether all strict trainings have equal bits

    @property
    def all_flags(self) -> Row | None:
        """The row of all flags together."""
        return next((row for row in self.rows if row.flag == ALL), None)

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        together = self.all_flags
        return asdict(self) | {"determinism_cost_pct": together.seconds.cost_pct if together else None}


def measure(series: Series, determinism: Determinism, cycles: int, only: Sequence[str] = ()) -> Costs:
    """Make the trainings of all cycles and compare them.

    Raises:
        UserError: a flag is relaxed already, one of `only` is not known, or the trainings have too few steps.
    """
    rows_here(determinism, "any", only)  # refused before a training is made
    first = series.one(_requested(STRICT, 0))
    device = first.receipt.stated["environment"]["preimage"]["device"]
    names = rows_here(determinism, device, only)
    rest = series.make([_requested(*each) for each in in_turn(names, cycles)][1:])
    seconds, memory, bits = ({name: list[Any]() for name in (STRICT, *names)} for _ in range(3))
    for made in chain([first], rest):
        name = made.requested.name
        seconds[name].append(step_seconds(made))
        memory[name].append(made.memory())
        bits[name].append(made.bits)
    rows = []
    for name in names:
        time, held = (compared(of[STRICT], of[name], len(names)) for of in (seconds, memory))
        rows.append(Row(name, time, held, {*bits[name]} == {*bits[STRICT]}))
    return Costs(device, cycles, rows, len({*bits[STRICT]}) == 1)


def lines(costs: Costs) -> list[str]:
    """The table and the sentences below it."""
    rows, alone = costs.rows, [row for row in costs.rows if row.flag != ALL]
    cells = [
        [
            row.flag,
            *(f"{1000 * seconds:.4g}" for seconds in (row.seconds.strict, row.seconds.relaxed)),
            *_percent(row.seconds),
            *_percent(row.memory),
            "same" if row.same_bits else "other",
        ]
        for row in rows
    ]
    found = table(HEAD, cells)
    if together := costs.all_flags:
        found += [f"All flags together: {_reported(together.seconds, 'time')}, {_reported(together.memory, 'memory')}."]
    if alone:
        clear = [row.flag for row in alone if row.seconds.differs_from_zero]
        found += [
            f"Alone, {', '.join(clear) or 'none'} of {len(alone)} can be told from zero in time. In brackets: cannot."
        ]
    if rows[0].seconds.low is None:
        wanted = fewest_cycles(len(rows))
        found += [f"No intervals: {costs.cycles} cycles seen, --cycles {wanted} wanted for {len(rows)} rows."]
    if not costs.repeats:
        found += ["The strict trainings do not repeat. Find out why: samebits verify"]
    return found


def _percent(cost: Cost) -> list[str]:
    """The cost, in brackets where it cannot be told from zero, and its interval."""
    within = "" if cost.low is None or cost.high is None else f"{cost.low:+.1f} … {cost.high:+.1f}"
    return [f"{cost.cost_pct:+.1f}" if cost.differs_from_zero else f"({cost.cost_pct:+.1f})", within]


def _reported(cost: Cost, of: str) -> str:
    if not cost.differs_from_zero:
        return f"a cost in {of} cannot be told from zero"
    return f"{abs(cost.cost_pct):.1f} % {'more' if cost.cost_pct > 0 else 'less'} {of}"
