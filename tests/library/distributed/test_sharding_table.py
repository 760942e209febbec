"""docs/sharding.md: its calculated tables are what `Transport` sends, counted without any other rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor

from samebits.core import tree
from samebits.core.ranks import World
from samebits.core.transport import Transport
from samebits.core.tree import Node, nodes_of, push

DOCUMENT = Path(__file__).parents[3] / "docs" / "sharding.md"
CPU = torch.device("cpu")
HOSTS = (2, 2, 8), (2, 3, 12), (3, 2, 12), (128, 8, 1024)  # hosts, ranks on each, leaves


@dataclass(frozen=True)
class Counted(World):
    """Ranks of which only this one is there: nothing arrives, and the bytes of what it sends to the others are counted.

    Attributes:
        moved: by all-to-all.
        gathered: by all-gather, in which each of the others needs this rank's part.
    """

    moved: list[int] = field(default_factory=list, compare=False)
    gathered: list[int] = field(default_factory=list, compare=False)

    def all_to_all(self, sent: Tensor, received: Tensor, to: Sequence[int], of: Sequence[int]) -> None:
        self.moved.append((sum(to) - to[self.rank]) * sent.element_size())

    def all_gather(self, part: Tensor, gathered: Tensor, ring: bool = False) -> None:
        self.gathered.append((self.size - 1) * part.numel() * part.element_size())


def sent(hosts: int, local: int, leaves: int, rank: int) -> dict[str, float]:
    """Bytes that a rank sends for each element of a vector of float32, by exchange and distance."""
    inside, between = Counted(rank % local, local, CPU), Counted(rank // local, hosts, CPU)
    nodes = [nodes_of(block, leaves) for block in tree.blocks(leaves, hosts * local)]
    transport = Transport([world for world in (inside, between) if world.size > 1], nodes, leaves)
    ((node, part),) = transport.finish(transport.start(transport.room(1, torch.zeros(0)).zero_()))
    assert node == (0, leaves)
    transport.gather(part)
    counted = {"moved between": between.moved, "moved inside": inside.moved}
    counted |= {"gathered between": between.gathered, "gathered inside": inside.gathered}
    return {way: sum(counts) / transport.parts for way, counts in counted.items()}


def block_rows() -> list[str]:
    """N, R, the blocks, the mean number of nodes, and the bytes for each parameter and step beside (R-1)/R."""
    rows = []
    for leaves in (8, 64, 128):
        for ranks in (3, 5, 6, 7):
            dealt = tree.blocks(leaves, ranks)
            nodes = mean(len(nodes_of(block, leaves)) for block in dealt)
            counted = mean(sum(sent(ranks, 1, leaves, rank).values()) for rank in range(ranks)) * ranks / (ranks - 1)
            assert counted == pytest.approx(4 * nodes + 4)
            sizes = " ".join(str(len(block)) for block in dealt)
            rows.append(f"| {leaves} | {ranks} | {sizes} | {nodes:.2f} | {counted:.1f} |")
    return rows


def host_rows() -> list[str]:
    """Hosts x ranks of each, N, what all-to-all would send between hosts in one level, and what each exchange sends."""
    rows = []
    for hosts, local, leaves in HOSTS:
        nodes = [len(nodes_of(block, leaves)) for block in tree.blocks(leaves, hosts * local)]
        flat = 4 * mean(nodes) * (hosts - 1) / hosts  # to the owners on other hosts
        ranks = [0] if hosts * local == leaves else range(hosts * local)  # of one leaf each, all send as much
        counted = [list(sent(hosts, local, leaves, rank).values()) for rank in ranks]
        cells = [f"{each:.2f}" for each in (flat, *map(mean, zip(*counted, strict=True)))]
        rows.append(f"| {hosts} x {local} | {leaves} | {' | '.join(cells)} |")
    return rows


def require_rows(rows: Sequence[str]) -> None:
    """They are a table of the document, from its first row to its last."""
    table = "\n".join(["|---|", *rows, ""])
    assert f"{table}\n" in DOCUMENT.read_text(encoding="utf-8"), table


def test_table_of_blocks_is_what_ranks_send():
    require_rows(block_rows())


def test_table_of_hosts_is_what_ranks_send():
    require_rows(host_rows())


def test_other_blocks_are_another_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree, "blocks", lambda n, r: [range(n * i // r, n * (i + 1) // r) for i in range(r)])
    with pytest.raises(AssertionError):
        require_rows(block_rows())


def test_aligned_block_holds_one_set_more_than_levels():
    for levels in range(8):
        for leaves in (1 << levels, 3 << levels):
            nodes: list[tuple[Node, None]] = []
            most = 0
            for leaf in range(1 << levels):
                most = max(most, len(nodes) + 1)
                push(nodes, (leaf, leaf + 1), None, leaves, lambda *_: None)
            assert (most, len(nodes)) == (levels + 1, 1)
