"""The parts of a report that are drawn: curves, times by rank, memory, and where runs part."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base.text import short
from ...record.view import Curve, Rank, RunView
from .. import diff
from . import measured, plots
from .plots import Bar, Pen
from .svg import Picture

MOST = 60  # pictures of metrics
FOLDED = 16  # rows of ranks beyond which a table is folded
LOSS = "loss"
EDGES = ("dashed", "dotted")  # of noise floors, as plots.lines draws them


def metrics_in_order(runs: Sequence[RunView]) -> list[str]:
    """The logged metrics: the loss first, the others as they were logged first."""
    logged = dict.fromkeys(name for run in runs for name in run.curves)
    return sorted(logged, key=lambda name: name != LOSS)


def steps_of(runs: Sequence[RunView]) -> float:
    """How far the axis of all pictures over steps goes."""
    ends = [curve.steps.max() for run in runs for curve in run.curves.values() if len(curve.steps)]
    return float(max([1, *ends]))


def curves(
    runs: Sequence[RunView], pens: Sequence[Pen], metrics: Sequence[str], noise: Mapping[str, Any] | None
) -> list[Picture]:
    """A picture of each of the metrics, up to `MOST`."""
    found = []
    for name in metrics[:MOST]:
        having = [(run, pen) for run, pen in zip(runs, pens, strict=True) if name in run.curves]
        bands = measured.bands(noise, name)
        alt = f"{name} over steps. " + " ".join(_range(run, run.curves[name]) for run, _ in having)
        image = plots.lines([(run.curves[name], pen) for run, pen in having], steps_of(runs), bands)
        floor = [
            f"{each.name} ({edge}) {each.low:.4g} to {each.high:.4g}" for each, edge in zip(bands, EDGES, strict=False)
        ]
        notes = [f"Noise floor, mean ± deviation: {', '.join(floor)}." if floor else ""]
        holders = [run for run, _ in having]
        notes += [equal(holders, name), *(gaps(run, name) for run in holders)]
        found.append(Picture(image, name, " ".join(filter(None, notes)), alt))
    return found


def _range(run: RunView, curve: Curve) -> str:
    known = curve.values[np.isfinite(curve.values)]
    if not len(known):
        return f"{run.name}: no finite value."
    ends = f"from {known[0]:.4g} to {known[-1]:.4g}, smallest {known.min():.4g}, largest {known.max():.4g}"
    return f"{run.name}: {ends}."


def equal(runs: Sequence[RunView], name: str) -> str:
    """Which runs have one and the same curve, which is seen once; nothing where none have."""
    groups: dict[bytes, list[str]] = {}
    for run in runs:
        curve = run.curves[name]
        groups.setdefault(curve.steps.tobytes() + b"|" + curve.values.tobytes(), []).append(run.name)
    return " ".join(f"One line: {', '.join(group)}." for group in groups.values() if len(group) > 1)


def gaps(run: RunView, name: str) -> str:
    """What of a curve no line can show, in words; nothing where it shows all."""
    curve = run.curves[name]
    kinds = {
        "NaN": np.isnan(curve.values),
        "infinite": np.isinf(curve.values),
        "too large to draw": np.isfinite(curve.values) & (np.abs(curve.values) > plots.LARGEST),
    }
    found = [
        f"{int(where.sum())} of {len(where)} values {'is' if where.sum() == 1 else 'are'} {kind}, "
        f"first at step {int(curve.steps[where][0])}"
        for kind, where in kinds.items()
        if where.any()
    ]
    return f"{run.name}: {'; '.join(found)}: gaps in its line." if found else ""


def times(runs: Sequence[RunView]) -> dict[str, Any]:
    """For each run, how long each phase took on each rank, as a map and in numbers."""
    found, rows = [], []
    phases = [*dict.fromkeys(phase for run in runs for rank in run.ranks for phase in rank.seconds)]
    for run in [run for run in runs if run.ranks]:
        medians = {rank.number: [_median(rank, phase) for phase in phases] for rank in run.ranks}
        message = "; ".join(f"rank {name}: {', '.join(_named(phases, of))}" for name, of in [*medians.items()][:FOLDED])
        alt = f"Seconds of each phase by rank and step, {run.name}. Medians: {message}"
        unread = sum(rank.unread for rank in run.ranks)
        lost = f"Lines of the trace that cannot be read: {unread}." if unread else ""
        found.append(Picture(plots.heat(run.ranks, phases), run.name, lost, alt))
        rows += [
            [run.name, str(rank.number), rank.host, str(len(rank.steps))]
            + [plots.duration(median) for median in medians[rank.number]]
            + [measured.size(rank.memory)]
            for rank in run.ranks
        ]
    return {"pictures": found, "head": ["run", "rank", "host", "steps", *phases, "peak memory"], "rows": rows}


def _median(rank: Rank, phase: str) -> float:
    values = rank.seconds.get(phase, np.empty(0))
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 0.0


def _named(phases: Sequence[str], medians: Sequence[float]) -> list[str]:
    return [f"{phase} {plots.duration(median)}" for phase, median in zip(phases, medians, strict=True)]


def memory(runs: Sequence[RunView]) -> dict[str, Any]:
    """The most memory that a rank held, for each run: a picture, or a sentence of one run."""
    known = [(run.name, run.memory) for run in runs if run.memory]
    said = [f"{name}: {measured.size(held)}" for name, held in known]
    if len(known) < 2:
        return {"pictures": [], "sentence": f"{said[0]}, on the rank that held most." if said else ""}
    unit = 2**30 if max(held for _, held in known) >= 2**30 else 2**20
    rows = [Bar(short(name, measured.LONGEST), held / unit, held / unit, held / unit) for name, held in known]
    image = plots.bars(rows, "GiB" if unit == 2**30 else "MiB")
    picture = Picture(image, "On the rank that held most", "", f"Peak memory. {'; '.join(said)}")
    return {"pictures": [picture], "sentence": ""}


def parting(runs: Sequence[RunView], pens: Sequence[Pen]) -> dict[str, Any]:
    """Where runs part from the first one that logged as many steps, and how far their losses part."""
    rows, lines, marks = [], [], []
    for number, run in enumerate(runs):
        first = next((each for each in runs[:number] if _as_long(each, run)), None)
        if first is None:
            continue
        one, other = _loss(first), _loss(run)
        apart = np.abs(other.values - one.values)
        known = apart[np.isfinite(apart)]
        place = diff.first_place(first, run) if first.is_comparable and run.is_comparable else None
        differing = np.flatnonzero((apart != 0) & ~(np.isnan(one.values) & np.isnan(other.values)))
        if place is None and not len(differing):
            continue
        step = place.step if place else int(other.steps[differing[0]])
        where = str(place) if place else f"step {step}, loss (no trace of both tells more)"
        distances = [f"{known.max():.3g}", f"{known[-1]:.3g}"] if len(known) else ["not finite"] * 2
        rows.append([run.name, first.name, where, *distances])
        marks.append((float(step), pens[number]))
        if (known > 0).any():
            lines.append((run.name, Curve(other.steps, np.where(apart > 0, apart, np.nan)), pens[number]))
    pictures = []
    if lines:
        image = plots.lines([(curve, pen) for _, curve, pen in lines], steps_of(runs), marks=marks, logarithmic=True)
        note = "A vertical line marks the first difference. Where two losses are equal, nothing is drawn."
        alt = "Distance of the losses over steps. " + " ".join(
            f"{run} and {first} part at {where}; the largest distance is {largest}."
            for run, first, where, largest, _ in rows
        )
        pictures.append(Picture(image, "Distance of the losses, |difference|", note, alt))
    return {"pictures": pictures, "lines": [(name, pen) for name, _, pen in lines], "rows": rows}


def _loss(run: RunView) -> Curve:
    """Its loss; of a run that logs none, what it logs first."""
    return run.curves.get(LOSS) or next(iter(run.curves.values()))


def _as_long(one: RunView, other: RunView) -> bool:
    return bool(one.curves and other.curves) and np.array_equal(_loss(one).steps, _loss(other).steps)
