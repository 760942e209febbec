"""Ranks compare values before step 0 and while they train; a rank that differs is named."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.alike import together
from ..core.digest import tensor_digests
from ..core.errors import Disagreement
from ..core.ranks import World
from ..core.shards import Held, Shard

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


def require_agreement(report: Report, world: World, what: str) -> None:
    """Stop every rank alike if one reports another value than the rest.

    Raises:
        Disagreement: with the table of fields, values, ranks and hosts.
    """
    if world.size == 1:
        return
    digest = hashlib.sha256(repr(sorted(report.items())).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:  # a thousand ranks need not send each other a thousand reports
        return
    hosts, reports = zip(*world.gather((world.place, dict(report))), strict=True)
    groups = disagreements(reports, hosts)
    if groups:
        raise Disagreement(f"{what}\n{table(groups)}\n{blame(groups, world.size)}")


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


def require_same_weights(weights: Mapping[str, Tensor], step: int, world: World, whose: str = "ranks'") -> None:
    """Compare the weights of all ranks bit by bit, by their digests: one small all-reduce when they agree.

    `whose` says of whom the world's ranks are the numbers.

    Raises:
        Disagreement: naming the tensors that differ, by rank, host and device.
    """
    if world.size == 1 or not weights:
        return
    digests = tensor_digests(weights)
    total = (digests * torch.arange(1, len(digests) + 1, device=digests.device)).sum()
    totals = digests.new_zeros(world.size)
    totals[world.rank] = total
    world.sum(totals)
    if bool((totals == total).all()):  # one synchronisation, however many ranks
        return
    report = {name: f"{value % 2**64:016x}" for name, value in zip(weights, digests.tolist(), strict=True)}
    require_agreement(report, world, f"step {step}: the {whose} weights differ, by the digests of:")


def require_replicas(held: Mapping[str, Held], step: int, world: World, replicas: World) -> None:
    """Compare what ranks hold alike: whole weights and buffers, and the shards that `replicas` of this rank hold.

    Raises:
        Disagreement: as `require_same_weights`; a fault in one replica ends them all.
    """
    require_same_weights({name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}, step, world)
    cut = {name: shard.local for name, shard in held.items() if isinstance(shard, Shard)}
    if replicas.size > 1:
        together(world, lambda: require_same_weights(cut, step, replicas, "replicas'"))
