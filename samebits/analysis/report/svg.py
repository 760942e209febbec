"""Pictures of matplotlib as images that hold their own bytes."""

import io
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

INK, RULE = "#1b1b1b", "#c9c9c9"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "samebits report",  # the same picture, the same bytes
    "text.parse_math": False,  # a $ of somebody's name is no mathematics
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica Neue", "Arial"],  # matplotlib brings the first: it measures letters
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "lines.scale_dashes": False,
    "lines.linewidth": 1.3,
    "path.simplify": False,  # a line is thinned before it is drawn
}
UNSAID = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Picture:
    """A picture, its title, what has to be known of it, and what those hear who do not see it."""

    source: Markup  # a `data:` address
    title: str
    note: str
    alt: str


def image(size: tuple[float, float], draw: Callable[[Figure], None]) -> Markup:
    """The `data:` address of what `draw` makes in a figure of `size` (width and height in inches)."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):  # whatever a matplotlibrc here says
        figure, file = Figure(figsize=size), io.BytesIO()
        draw(figure)
        figure.savefig(file, format="svg", metadata=UNSAID)
    return Markup(f"data:image/svg+xml;base64,{b64encode(file.getvalue()).decode()}")
