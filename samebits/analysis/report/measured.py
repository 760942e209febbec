"""What other verbs measured, for a report: the noise floor, the cost of determinism, the checklist."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...base.files import read_json
from ...base.forms import ABSENT, Form, NotFinite
from ...base.text import short
from . import plots, public
from .plots import Band, Bar
from .svg import Picture

BANDS = ("relaxed", "seeds")  # groups of a noise floor: what is drawn of it
LONGEST = 26  # letters of a name beside a bar
SIDES, ENDS, SURE = ("strict", "relaxed"), ("cost_pct", "low", "high"), {True: "yes", False: "no"}
HOLLOW = " Hollow: not told from zero."
SIGNS = {"ok": "✓", "warning": "!", "FAULT": "✗", "unknown": "?"}


Number = float | NotFinite | None


class Spread(Form):
    """A metric of a group."""

    mean: Number
    deviation: Number


class Group(Form):
    """A group of runs."""

    metrics: dict[str, Spread]


class Noise(Form):
    """What `samebits noise` prints."""

    groups: dict[str, Group]
    verdicts: list[Any] = ABSENT


class Spent(Form):
    """What a flag costs."""

    strict: Number
    relaxed: Number
    cost_pct: Number
    low: Number
    high: Number
    differs_from_zero: bool


class Flag(Form):
    """A flag and its costs."""

    flag: str
    seconds: Spent | None
    memory: Spent | None = None


class Cost(Form):
    """What `samebits cost` prints."""

    device: str
    rows: list[Flag]
    determinism_cost_pct: Number


class Check(Form):
    """A row of what `samebits doctor` prints."""

    area: str
    name: str
    state: str
    seen: str
    fix: str


def read(path: Path | None, form: Any, verb: str) -> Any:
    """What a verb wrote with --json; None where no file is given.

    Raises:
        UserError: it is missing, or of another form.
    """
    return read_json(path, form, f"A file is wanted as `samebits {verb} --json` prints it") if path else None


def number(held: Any) -> float:
    """A number, NaN where there is none."""
    return math.nan if held is None else float(held)


def bands(noise: Mapping[str, Any] | None, metric: str) -> list[Band]:
    """The noise floor of a metric: its mean and a deviation to either side, for each group that has it."""
    found = []
    for group in BANDS:
        of = ((noise or {"groups": {}})["groups"].get(group) or {"metrics": {}})["metrics"].get(metric)
        mean, deviation = (number(of[name]) for name in ("mean", "deviation")) if of else (math.nan, math.nan)
        if math.isfinite(mean) and math.isfinite(deviation) and abs(mean) + abs(deviation) < plots.LARGEST:
            found.append(Band(group, mean - deviation, mean + deviation))
    return found


def noise_floor(noise: Mapping[str, Any] | None, drawn: Iterable[str]) -> dict[str, Any] | None:
    """The table of the noise floor, and the verdicts on it."""
    if not noise:
        return None
    rows = [
        [metric, group, *(_said(of[name], "{:.4g}".format) for name in ("mean", "deviation")), _values(of)]
        for group, held in noise["groups"].items()
        for metric, of in held["metrics"].items()
    ]
    verdicts = [each if isinstance(each, str) else _sentence(each) for each in noise.get("verdicts", [])]
    left = sorted({row[0] for row in rows} - {*drawn})
    return {"verdicts": [*map(public.words, verdicts)], "rows": rows, "left": left}


def _said(held: Any, write: Callable[[float], str]) -> str:
    return write(number(held)) if math.isfinite(number(held)) else "unknown"


def _values(of: Mapping[str, Any]) -> str:
    values = of.get("values")
    return f"{len(values)}" if isinstance(values, list) else "unknown"


def _sentence(verdict: Any) -> str:
    held = verdict.get("sentence") if isinstance(verdict, dict) else None
    return held if isinstance(held, str) else json.dumps(verdict, sort_keys=True)


def costs(cost: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What determinism costs: bars with intervals, and the numbers behind them."""
    if not cost:
        return None
    pictures, tables = [], {}
    for quantity, unit in (("seconds", plots.duration), ("memory", size)):
        rows = [(row["flag"], row[quantity]) for row in cost["rows"] if row.get(quantity)]
        drawn = [Bar(short(name, LONGEST), *ends, of["differs_from_zero"]) for name, of in rows if (ends := _ends(of))]
        if drawn:
            alt = f"Cost of each flag in {quantity}: " + "; ".join(f"{bar.name} {bar.value:+.3g} %" for bar in drawn)
            note = "The thin line is the interval." + ("" if all(bar.sure for bar in drawn) else HOLLOW)
            image = plots.bars(drawn, f"{quantity} of strict above relaxed, in percent")
            pictures.append(Picture(image, f"Cost in {quantity}", note, alt))
        tables[quantity] = [
            [
                name,
                *(_said(of[part], unit) for part in SIDES),
                *(_said(of[part], "{:+.3g} %".format) for part in ENDS),
                SURE[of["differs_from_zero"]],
            ]
            for name, of in rows
        ]
    whole = number(cost["determinism_cost_pct"])
    said = f"all flags together cost {whole:+.3g} %" if math.isfinite(whole) else "the cost of all is not known"
    return {"device": public.words(cost["device"]), "whole": said, "pictures": pictures, "tables": tables}


def _ends(of: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """A cost and its interval, where they can be drawn."""
    value = number(of["cost_pct"])
    low, high = (number(of[name]) for name in ("low", "high"))
    if not abs(value) < plots.LARGEST:
        return None
    return value, low if abs(low) < plots.LARGEST else value, high if abs(high) < plots.LARGEST else value


def size(amount: float) -> str:
    """Bytes in a unit that fits."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(amount) >= factor:
            return f"{amount / factor:.3g} {unit}" if abs(amount) < 1000 * factor else f"{amount / factor:.0f} {unit}"
    return f"{amount:.0f} B"


def checklist(rows: list[Mapping[str, str]] | None) -> list[list[str]] | None:
    """The checklist as `samebits doctor` reported it: a row of each check."""
    if rows is None:
        return None
    return [
        [f"{row['area']}: {row['name']}", f"{SIGNS.get(row['state'], '')} {row['state']}".strip()]
        + [public.words(" ".join(row[part].split())) for part in ("seen", "fix")]
        for row in rows
    ]
