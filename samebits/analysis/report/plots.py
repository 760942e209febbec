"""The pictures of a report: lines over steps, a map of times by rank, bars."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...base.shape import plain
from ...record.view import Curve, Rank
from ..statistics import Numbers
from .svg import INK, RULE, image

# Okabe and Ito's colours, which colour-blind people tell apart, but for black and the yellow that white swallows; see
# https://jfly.uni-koeln.de/color/
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 3), (1.2, 2.4), (7, 2.5, 1.2, 2.5), (10, 4))
WIDTH = 4.6  # inches; all pictures have it, so that their letters have one size
STRETCHES, BINS = 333, 200  # of a line, which has three points of each; columns of a map
LARGEST = 1e150  # what is beyond is told in words: an axis cannot hold it
HUE = "cividis"  # which colour-blind people read, too
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Pen:
    """How the lines of a run are drawn: a wide one, with no dash, is seen below the others where all are equal."""

    colour: str
    dash: tuple[float, ...]

    @property
    def width(self) -> float:
        """In points."""
        return 1.2 if self.dash else 2.0


@dataclass(frozen=True)
class Band:
    """A noise floor: from `low` to `high` over all steps."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Bar:
    """A value and its interval; `sure` where it is told from zero."""

    name: str
    value: float
    low: float
    high: float
    sure: bool = True


def pen(number: int) -> Pen:
    """That of a run, by its place among the runs: neighbours differ in colour and in dash."""
    return Pen(COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)])


def drawable(values: Numbers) -> Numbers:
    """The values with NaN, a gap, for each that no axis can hold."""
    return np.where(np.abs(values) <= LARGEST, values, np.nan)


@dataclass(frozen=True)
class Thin:
    """A curve in few points: its mean over each of equal stretches, and the smallest and the largest there."""

    steps: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


def thinned(curve: Curve) -> Thin:
    """A curve in at most `STRETCHES`; where it has no more points than that, each is one."""
    count = len(curve.steps)
    starts = np.linspace(0, count, min(STRETCHES, count), endpoint=False).astype(int)
    known = np.isfinite(curve.values)
    counts = np.add.reduceat(known, starts, dtype=int) if count else starts
    parts = []
    for how, otherwise in ((np.add, 0.0), (np.minimum, np.inf), (np.maximum, -np.inf)):
        part = how.reduceat(np.where(known, curve.values, otherwise), starts) if count else np.empty(0)
        parts.append(np.where(counts > 0, part, np.nan))
    return Thin(curve.steps[starts], parts[0] / np.maximum(counts, 1), *parts[1:])


def lines(
    curves: Sequence[tuple[Curve, Pen]],
    steps: float,
    bands: Sequence[Band] = (),
    marks: Sequence[tuple[float, Pen]] = (),
    logarithmic: bool = False,
) -> Markup:
    """Curves over so many steps on one pair of axes; `marks` are steps with a vertical line each."""

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.13, 0.17, 0.84, 0.79))
        for number, band in enumerate(bands):
            axes.axhspan(band.low, band.high, facecolor=INK, alpha=0.1, linewidth=0)
            dash = (0, DASHES[number + 1])
            for edge in (band.low, band.high):
                axes.axhline(edge, color=INK, alpha=0.45, linewidth=0.6, linestyle=dash)
        for curve, its in curves:
            thin = thinned(Curve(curve.steps, drawable(curve.values)))
            marker = "o" if np.isfinite(thin.mean).sum() <= 30 else ""
            if len(thin.steps) < len(curve.steps):
                axes.fill_between(thin.steps, thin.low, thin.high, color=its.colour, alpha=0.18, linewidth=0)
            (line,) = axes.plot(thin.steps, thin.mean, color=its.colour, linewidth=its.width)
            line.set(linestyle=(0, its.dash) if its.dash else "-", marker=marker, markersize=2.6)
        if logarithmic:
            _logarithmic(axes)
        for step, mark in marks:
            axes.axvline(step, color=mark.colour, linewidth=0.8, linestyle=(0, mark.dash))
        _over_steps(axes)
        axes.set_xlim(-0.015 * steps, 1.015 * steps)

    return image((WIDTH, 2.5), draw)


def _over_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_power))


def _power(value: float, _: int) -> str:
    """A power of ten, as a tick says it."""
    return "10" + str(round(float(np.log10(value)))).translate(SUPERSCRIPT)


def heat(ranks: Sequence[Rank], phases: Sequence[str]) -> Markup:
    """A map of seconds: a panel for each phase, a row for each rank, columns of steps from left to right."""
    panel = min(max(0.16 * len(ranks), 0.3), 1.8)
    gap, below = 0.34, 0.42
    height = len(phases) * (panel + gap) + below

    def draw(figure: Figure) -> None:
        end = max(int(rank.steps[-1]) + 1 for rank in ranks)
        for number, phase in enumerate(phases):
            seen = np.array([binned(rank, phase, end) for rank in ranks])
            bottom = (height - (number + 1) * (panel + gap)) / height
            axes = figure.add_axes((0.13, bottom, 0.72, panel / height))
            top = ceiling(seen)
            axes.imshow(
                np.ma.masked_invalid(seen),
                cmap=HUE, vmin=0, vmax=top, aspect="auto", interpolation="none",
                extent=(0, end, len(ranks) - 0.5, -0.5),
            )  # fmt: skip
            axes.grid(False)
            axes.set_title(plain(phase), pad=3)
            axes.spines[:].set_visible(False)
            axes.set_yticks(places := [*range(len(ranks))] if len(ranks) <= 8 else [0, len(ranks) - 1])
            axes.set_yticklabels([str(ranks[place].number) for place in places])
            _over_steps(axes)
            if number < len(phases) - 1:
                axes.tick_params(bottom=False, labelbottom=False)
                axes.set_xlabel("")
            _scale(figure, (0.88, bottom, 0.02, panel / height), top)
        figure.text(0.02, (height - gap) / height, "rank", va="bottom")

    return image((WIDTH, height), draw)


def _scale(figure: Figure, place: tuple[float, float, float, float], top: float) -> None:
    """Beside a panel: which colour is how long."""
    axes = figure.add_axes(place)
    axes.imshow(np.linspace(1, 0, 64)[:, None], cmap=HUE, aspect="auto", interpolation="none", extent=(0, 1, 0, top))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.set_yticks([0, top])
    axes.set_yticklabels(["0", duration(top)])


def binned(rank: Rank, phase: str, end: int) -> Numbers:
    """The mean seconds of a phase in at most `BINS` equal stretches of the steps before `end`; NaN where none is."""
    columns = min(BINS, end)
    place, values = (rank.steps * columns // end).astype(int), rank.seconds.get(phase, np.full(len(rank.steps), np.nan))
    known = np.isfinite(drawable(values))
    counts = np.bincount(place[known], minlength=columns)
    sums = np.bincount(place[known], values[known], minlength=columns)
    return np.divide(sums, counts, out=np.full(columns, np.nan), where=counts > 0)


def ceiling(seen: Numbers) -> float:
    """Where the colours of a map end: at two to four times the median, so that one slow step hides no other."""
    known = seen[np.isfinite(seen) & (seen > 0)]
    return float(np.clip(known.max(), 2 * np.median(known), 4 * np.median(known))) if len(known) else 1.0


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def bars(rows: Sequence[Bar], label: str) -> Markup:
    """Horizontal bars with their intervals; those not told from zero are hollow."""
    height = 0.21 * len(rows) + 0.5

    def draw(figure: Figure) -> None:
        left = min(0.06 + 0.0155 * max(len(row.name) for row in rows), 0.46)  # about as wide as the longest name
        axes = figure.add_axes((left, 0.42 / height, 0.97 - left, 1 - 0.5 / height))
        for place, bar in enumerate(rows):
            fill = COLOURS[0] if bar.sure else "none"
            axes.barh(place, bar.value, 0.62, linewidth=0.8, facecolor=fill, edgecolor=COLOURS[0])
            axes.plot([bar.low, bar.high], [place, place], color=INK, linewidth=0.8)
        axes.axvline(0, color=RULE, linewidth=0.8)
        axes.set_yticks(range(len(rows)))
        axes.set_yticklabels([row.name for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.grid(False, axis="y")

    return image((WIDTH, height), draw)
