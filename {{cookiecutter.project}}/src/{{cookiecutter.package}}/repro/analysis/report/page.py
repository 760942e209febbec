"""The parts of an HTML page that needs no other file, asks no network and runs no script."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from ...base.project import LIBRARY
from ...base.shape import plain

STYLE = LIBRARY / "lab" / "report" / "page.css"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # what a browser may load: nothing
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?( [%\wµ]{1,3})?$|unknown$|not finite$")
JOINT = re.compile(r"(?<!\d)[._/](?=\w)")
DIGEST = re.compile("[0-9a-f]{32,}")


def text(value: str) -> str:
    """Somebody's words as text of the page, whatever marks are in them."""
    return escape(plain(value), quote=True)


def document(title: str, body: str) -> str:
    """The whole page."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<style>
{STYLE.read_text("utf-8").strip()}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def section(title: str, *parts: str) -> str:
    """A section with its heading; nothing where it has no part."""
    told = [part for part in parts if part]
    return "\n".join([f"<section>\n<h2>{text(title)}</h2>", *told, "</section>"]) if told else ""


def paragraph(*sentences: str, kind: str = "") -> str:
    """Sentences; nothing where there is none."""
    said = " ".join(text(sentence) for sentence in sentences if sentence)
    return f"<p{f' class={kind}' if kind else ''}>{said}</p>" if said else ""


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that can be copied; nothing where it has no row.

    The first cell of a row is its head. A column of numbers alone stands to the right.
    """
    held = [*rows]
    if not held:
        return ""
    numeric = [all(NUMBER.match(row[place]) for row in held) for place in range(len(head))]
    columns = zip(head, numeric, strict=True)
    heads = "".join(f'<th scope="col"{_kind(cell, of)}>{_soft(cell)}</th>' for cell, of in columns)
    body = "\n".join(_row(row, numeric) for row in held)
    label = text(caption)
    return (
        f'<div class="table" role="region" aria-label="{label}" tabindex="0"><table>\n<caption>{label}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _row(cells: Sequence[str], numeric: Sequence[bool]) -> str:
    first, *others = cells
    told = "".join(f"<td{_kind(cell, of)}>{_soft(cell)}</td>" for cell, of in zip(others, numeric[1:], strict=True))
    return f'<tr><th scope="row">{_soft(first)}</th>{told}</tr>'


def _soft(cell: str) -> str:
    """A cell that may be broken between the parts of a name."""
    return JOINT.sub("\\g<0><wbr>", text(cell))


def _kind(cell: str, numeric: bool) -> str:
    kind = "number" if numeric else "digest" if DIGEST.search(cell) else "short" if len(cell) <= 12 else ""
    return f' class="{kind}"' if kind else ""


def folded(title: str, part: str) -> str:
    """A part that opens when it is asked for, and in print."""
    return f"<details><summary>{text(title)}</summary>\n{part}\n</details>" if part else ""


def figure(svg: str, title: str, *notes: str) -> str:
    """A picture with its title and what has to be known of it."""
    said = " ".join(text(note) for note in notes if note)
    return f"<figure><figcaption>{text(title)}{f'<span>{said}</span>' if said else ''}</figcaption>\n{svg}</figure>"


def pictures(found: Sequence[str]) -> str:
    """Pictures side by side where there is room."""
    return "\n".join(['<div class="pictures">', *found, "</div>"]) if found else ""


def key(names: Sequence[str], pens: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Which line is which run's: a piece of each with the name."""
    rows = []
    for name, (colour, dash) in zip(names, pens, strict=True):
        dashes = f' stroke-dasharray="{" ".join(f"{1.4 * each:g}" for each in dash)}"' if dash else ""
        line = f'<line x1="0" y1="5" x2="36" y2="5" stroke="{colour}" stroke-width="2"{dashes}/>'
        rows.append(f'<li><svg viewBox="0 0 36 10" aria-hidden="true">{line}</svg>{text(name)}</li>')
    return "\n".join(['<ul class="key">', *rows, "</ul>"])
