"""The parts of a report that are drawn: curves, times by rank, memory, and where runs part."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..shape import plain
from . import bits, measured, page, plots
from .plots import Bar, Line, Pen
from .seen import Curve, Rank, Seen
from .statistics import Numbers

MOST = 60  # pictures of metrics
FOLDED = 16  # rows of ranks beyond which a table is folded
LOSS = "loss"


def metrics_in_order(runs: Sequence[Seen]) -> list[str]:
    """The logged metrics: the loss first, the others as they were logged first."""
    logged = dict.fromkeys(name for run in runs for name in run.curves)
    return sorted(logged, key=lambda name: name != LOSS)


def curves(runs: Sequence[Seen], pens: Sequence[Pen], metrics: Sequence[str], noise: Mapping[str, Any] | None) -> str:
    found = []
    for number, name in enumerate(metrics[:MOST]):
        having = [(run, pen) for run, pen in zip(runs, pens, strict=True) if name in run.curves]
        bands = measured.bands(noise, name)
        alt = f"{plain(name)} over steps. " + " ".join(_range(run, run.curves[name]) for run, _ in having)
        svg = plots.lines(f"curve-{number}", alt, [Line(run.curves[name], pen) for run, pen in having], bands)
        floor = [f"{band.name} {band.low:.4g} to {band.high:.4g}" for band in bands]
        notes = [f"Noise floor, mean ± deviation: {', '.join(floor)}." if floor else ""]
        found.append(page.figure(svg, name, *notes, *(gaps(run, name) for run, _ in having)))
    more = metrics[MOST:]
    left = f"{len(more)} more metrics were logged and are not drawn: {', '.join(more)}." if more else ""
    legend = page.key([run.name for run in runs], [(pen.colour, pen.dash) for pen in pens])
    nothing = "" if found else page.paragraph("No numbers over steps are recorded.")
    return page.section(
        "Loss and metrics over steps", legend if found else "", page.pictures(found), page.paragraph(left), nothing
    )


def _range(run: Seen, curve: Curve) -> str:
    known = curve.values[np.isfinite(curve.values)]
    if not len(known):
        return f"{plain(run.name)}: no finite value."
    return f"{plain(run.name)}: from {known[0]:.4g} to {known[-1]:.4g}, smallest {known.min():.4g}, largest {known.max():.4g}."


def gaps(run: Seen, name: str) -> str:
    """What of a curve no line can show, in words; nothing where it shows all."""
    curve = run.curves[name]
    kinds = {
        "NaN": np.isnan(curve.values),
        "infinite": np.isinf(curve.values),
        "too large to draw": np.isfinite(curve.values) & (np.abs(curve.values) > plots.LARGEST),
    }
    told = [
        f"{int(where.sum())} of {len(where)} values {'is' if where.sum() == 1 else 'are'} {kind}, "
        f"first at step {int(curve.steps[where][0])}"
        for kind, where in kinds.items()
        if where.any()
    ]
    return f"{run.name}: {'; '.join(told)}: gaps in its line." if told else ""


def _phases(ranks: Sequence[Rank]) -> list[str]:
    return [*dict.fromkeys(phase for rank in ranks for phase in rank.seconds)]


def times(runs: Sequence[Seen]) -> str:
    """For each run, how long each phase took on each rank, as a map and in numbers."""
    found, tables = [], []
    for number, run in enumerate(runs):
        if not run.ranks:
            continue
        phases = _phases(run.ranks)
        medians = {rank.number: [_median(rank, phase) for phase in phases] for rank in run.ranks}
        told = "; ".join(f"rank {name}: {', '.join(_named(phases, of))}" for name, of in [*medians.items()][:FOLDED])
        alt = f"Seconds of each phase by rank and step, {plain(run.name)}. Medians: {told}"
        unread = sum(rank.unread for rank in run.ranks)
        notes = "Bright is slow. Colours end at four times the median, or at the largest."
        lost = f"{unread} lines of the trace cannot be read." if unread else ""
        found.append(page.figure(plots.heat(f"times-{number}", alt, run.ranks, phases), run.name, notes, lost))
        rows = [
            [str(rank.number), rank.host, str(len(rank.steps))]
            + [plots.duration(median) for median in medians[rank.number]]
            + [measured.size(rank.memory)]
            for rank in run.ranks
        ]
        head = ["rank", "host", "steps", *(f"{phase}, median" for phase in phases), "peak memory"]
        table = page.table(f"Time and memory by rank, {run.name}", head, rows)
        tables.append(page.folded(f"{run.name}: {len(rows)} ranks", table) if len(rows) > FOLDED else table)
    return page.section("Time by rank", page.pictures(found), *tables)


def _median(rank: Rank, phase: str) -> float:
    values = rank.seconds.get(phase, np.empty(0))
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 0.0


def _named(phases: Sequence[str], medians: Sequence[float]) -> list[str]:
    return [f"{plain(phase)} {plots.duration(median)}" for phase, median in zip(phases, medians, strict=True)]


def memory(runs: Sequence[Seen]) -> str:
    """The most memory that a rank held, for each run."""
    known = [(run.name, run.memory) for run in runs if run.memory]
    if not known:
        return ""
    said = [f"{name}: {measured.size(held)}" for name, held in known]
    if len(known) == 1:
        return page.section("Peak memory", page.paragraph(f"{said[0]}, on the rank that held most."))
    unit = 2**30 if max(held for _, held in known) >= 2**30 else 2**20
    rows = [Bar(measured.short(name), held / unit, held / unit, held / unit) for name, held in known]
    alt = f"Peak memory. {plain('; '.join(said))}"
    svg = plots.bars("memory", alt, rows, "GiB" if unit == 2**30 else "MiB")
    return page.section("Peak memory", page.pictures([page.figure(svg, "On the rank that held most")]))


def divergence(runs: Sequence[Seen], pens: Sequence[Pen]) -> str:
    """Where runs part from the first one that logged as many steps, and how far their losses part."""
    rows, drawn, marks = [], [], []
    for number, run in enumerate(runs):
        first = next((each for each in runs[:number] if _as_long(each, run)), None)
        if first is None:
            continue
        apart = np.abs(_loss(run).values - _loss(first).values)
        place = bits.first_place(first, run)
        differing = np.flatnonzero((apart != 0) & ~_both_nan(run, first))
        if place is None and not len(differing):
            continue
        step = place.step if place else int(_loss(run).steps[differing[0]])
        where = str(place) if place else f"step {step}, loss (no trace of both tells more)"
        rows.append([run.name, first.name, where, *(_said(apart, of) for of in (np.nanmax, _last))])
        marks.append((float(step), pens[number]))
        if (np.isfinite(apart) & (apart > 0)).any():
            drawn.append((run, Line(Curve(_loss(run).steps, np.where(apart > 0, apart, np.nan)), pens[number])))
    if not rows:
        return ""
    alt = "Distance of the losses over steps. " + " ".join(
        f"{plain(row[0])} and {plain(row[1])} part at {plain(row[2])}; the largest distance is {row[3]}." for row in rows
    )
    pictures = []
    if drawn:
        svg = plots.lines("divergence", alt, [line for _, line in drawn], marks=marks, logarithmic=True)
        notes = "A vertical line marks the first difference. Where two losses are equal, nothing is drawn."
        pictures.append(page.figure(svg, "Distance of the losses, |difference|", notes))
    head = ["run", "compared with", "first difference", "largest distance of loss", "last"]
    return page.section(
        "Where the runs part",
        page.key([run.name for run, _ in drawn], [(line.pen.colour, line.pen.dash) for _, line in drawn]) if drawn else "",
        page.pictures(pictures),
        page.table("First difference of runs of one length", head, rows),
    )


def _loss(run: Seen) -> Curve:
    """Its loss; of a run that logs none, what it logs first."""
    return run.curves.get(LOSS) or next(iter(run.curves.values()))


def _as_long(one: Seen, other: Seen) -> bool:
    return bool(one.curves and other.curves) and np.array_equal(_loss(one).steps, _loss(other).steps)


def _both_nan(one: Seen, other: Seen) -> Any:
    return np.isnan(_loss(one).values) & np.isnan(_loss(other).values)


def _last(values: Numbers) -> float:
    return float(values[-1])


def _said(apart: Numbers, of: Any) -> str:
    known = apart[np.isfinite(apart)]
    return f"{of(known):.3g}" if len(known) else "not finite"
