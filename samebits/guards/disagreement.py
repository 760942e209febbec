"""On which values ranks disagree, in a table, and which ranks are outside the majority."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]  # field -> JSON value, as one rank sees it
SHOWN, VALUES, FIELDS, SPANS = 40, 4, 12, 8  # characters, values of a field, fields, runs of ranks


@dataclass(frozen=True)
class Group:
    """Ranks that hold one value of a field."""

    field: str
    value: Any
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]


def disagreements(reports: Sequence[Report], hosts: Sequence[str]) -> list[Group]:
    """Every field on which reports differ, its values grouped, the most common first. Reports are by rank."""
    groups = []
    for field in sorted(set().union(*reports)):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        values = {}
        for rank, report in enumerate(reports):
            text = repr(value := report.get(field))
            ranks_of[text].append(rank)
            values[text] = value
        if len(ranks_of) > 1:
            for text, ranks in sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1])):
                names = tuple(dict.fromkeys(hosts[rank] for rank in ranks))
                groups.append(Group(field, values[text], tuple(ranks), names))
    return groups


def table(groups: Sequence[Group]) -> str:
    """Field, value, ranks, hosts: a line per group; a table of hundreds of lines is cut short."""
    rows = [("field", "value", "ranks", "hosts")]
    of_field: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        of_field[group.field].append(group)
    for field, members in list(of_field.items())[:FIELDS]:
        alike = _alike([str(g.value) for g in members])
        rows += [(field, _short(str(g.value), alike), ranges(g.ranks), _few(g.hosts)) for g in members[:VALUES]]
        if others := members[VALUES:]:
            ranks = sorted(rank for group in others for rank in group.ranks)
            hosts = list(dict.fromkeys(host for group in others for host in group.hosts))
            rows.append((field, f"({len(others)} other values)", ranges(ranks), _few(hosts)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(of_field) > FIELDS:
        lines.append(f"and {len(of_field) - FIELDS} more fields")
    return "\n".join(lines)


def ranges(ranks: Sequence[int]) -> str:
    """Sorted ranks as `0-6,8`; a scattered many as `0,2,4,6,… (512 ranks)`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in spans[:SPANS]]
    return ",".join(shown) + (f",… ({len(ranks)} ranks)" if len(spans) > SPANS else "")


def _alike(texts: Sequence[str]) -> int:
    """How many first characters are the same in all."""
    return next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)


def _short(text: str, alike: int) -> str:
    """At most SHOWN characters on one line, around the place where values differ, after `alike` equal ones."""
    text = text.replace("\n", " ")
    if len(text) > SHOWN and alike > SHOWN // 2:
        text = f"…{text[alike - SHOWN // 4 :]}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def blame(groups: Sequence[Group], size: int) -> str:
    """The ranks outside the majority of some field; without a majority, nobody is blamed."""
    majorities = {group.field for group in groups if 2 * len(group.ranks) > size}
    minority = [g for g in groups if g.field in majorities and 2 * len(g.ranks) <= size]
    ranks = sorted({rank for group in minority for rank in group.ranks})
    if len({group.field for group in groups}) > len(majorities) or 2 * len(ranks) >= size:
        return "no value has a majority on its side, so no rank is blamed"
    by_rank = sorted(minority, key=lambda group: group.ranks)
    hosts = list(dict.fromkeys(host for group in by_rank for host in group.hosts))
    return f"against the majority: rank {ranges(ranks)} on {_few(hosts)}"
