"""Pictures of matplotlib as parts of an HTML page: text stays text, and the page's colours are theirs, too."""

import io
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

INK, RULE = "#010203", "#040506"  # stand for colours of the page, which a light and a dark scheme have each
PAGE = {INK: "currentColor", RULE: "var(--rule)"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "repro report",  # the same picture, the same bytes
    "text.parse_math": False,  # a $ of somebody's name is no mathematics
    "font.family": "DejaVu Sans",  # matplotlib brings it; places depend on the widths of letters
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
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
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
NAMED = re.compile(r"(?:(?<=^)|(?<=url\())#([\w.-]+)")
LONG = re.compile(r"(-?\d+\.\d\d)\d+")  # a hundredth of a point is finer than any screen
OURS = ("d", "x", "y", "points")  # attributes whose numbers are places; those of a transform may be factors


def picture(prefix: str, alt: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """An `svg` element that `draw` makes in a figure of `size` (width and height in inches).

    `alt` is what those hear who do not see it. All ids in it begin with `prefix`, for a page has each id once.
    """
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):  # whatever a matplotlibrc here says
        figure, file = Figure(figsize=size), io.StringIO()
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _inline(file.getvalue(), prefix, alt)


def _inline(text: str, prefix: str, alt: str) -> str:
    root = ElementTree.fromstring(text)
    ids = {each.attrib.get("id") for each in root.iter()}
    used = {name for each in root.iter() for value in each.attrib.values() for name in NAMED.findall(value)} & ids
    for parent in root.iter():
        for child in [*parent]:
            if _bare(child.tag) in ("metadata", "style"):  # that style would be one of the whole page
                parent.remove(child)
    for each in root.iter():
        each.tag = _bare(each.tag)
        each.attrib = {_bare(name): _value(_bare(name), value, prefix, used) for name, value in each.attrib.items()}
        if each.attrib.get("id", prefix).removeprefix(f"{prefix}-") not in used:
            each.attrib.pop("id", None)
        if each.tag != "text":
            each.text = None
        each.tail = None
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": alt,
        "stroke-linejoin": "round",
    }
    title = ElementTree.Element("title")
    title.text = alt
    root.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def _bare(name: str) -> str:
    """A name without its namespace, which HTML knows by itself."""
    return name.rpartition("}")[2]


def _value(name: str, value: str, prefix: str, used: set[str]) -> str:
    """An attribute as the page has it."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and not value.startswith("#"):
        return re.sub(r"\s", "", value)  # an image, in base64
    if name in OURS:
        return LONG.sub(r"\1", value.replace("\n", ""))
    value = re.sub(r"font-family: [^;]*;? ?", "", value)  # the page's own
    for stand_in, colour in PAGE.items():
        value = value.replace(stand_in, colour)
    return NAMED.sub(lambda found: f"#{prefix}-{found[1]}" if found[1] in used else found[0], value)
