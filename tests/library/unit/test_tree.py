"""The tree of additions: its shape, who adds which node, and how many are left. No ranks, and few tensors."""

from collections.abc import Callable, Sequence
from itertools import pairwise, permutations
from math import ceil, log2

import pytest
import torch

from samebits.core import tree
from samebits.core.tree import Node, blocks, joined, nodes_of, push, total

MOST, RANKS = 128, 16


def written(first: int, stop: int) -> str:
    """The additions below a node as a text, by the definition: a left child has the most leaves, a power of two."""
    if stop - first == 1:
        return str(first)
    size = 1 << (stop - first - 1).bit_length() - 1
    return f"({written(first, first + size)}+{written(first + size, stop)})"


def added(mine: Sequence[int], leaves: int) -> tuple[list[tuple[Node, str]], int]:
    """The nodes of these leaves with their additions, and the most that were held at once."""
    nodes: list[tuple[Node, str]] = []
    most = 0
    for leaf in mine:
        most = max(most, len(nodes) + 1)
        push(nodes, (leaf, leaf + 1), str(leaf), leaves, lambda left, right: f"({left}+{right})")
    return nodes, most


def brought_together(parts: Sequence[Sequence[int]], leaves: int) -> str:
    """The root, as those write it down who get all ranks' nodes."""
    nodes: list[tuple[Node, str]] = []
    for node, text in sorted(pair for mine in parts for pair in added(mine, leaves)[0]):
        push(nodes, node, text, leaves, lambda left, right: f"({left}+{right})")
    ((node, text),) = nodes
    assert node == (0, leaves)
    return text


@pytest.mark.parametrize(
    ("leaves", "wanted"),
    [(1, "0"), (2, "(0+1)"), (3, "((0+1)+2)"), (7, "(((0+1)+(2+3))+((4+5)+6))"), (6, "(((0+1)+(2+3))+(4+5))")],
)
def test_tree_is_perfect_and_cut_off_behind_the_last_leaf(leaves: int, wanted: str):
    assert written(0, leaves) == wanted
    assert added(range(leaves), leaves)[0] == [((0, leaves), wanted)]


def test_root_is_the_same_for_any_number_of_ranks():
    for leaves in range(1, 65):
        for ranks in range(1, min(leaves, RANKS) + 1):
            assert brought_together(blocks(leaves, ranks), leaves) == written(0, leaves), (leaves, ranks)
            strided = [range(rank, leaves, ranks) for rank in range(ranks)]  # as the passes of FSDP2
            assert brought_together(strided, leaves) == written(0, leaves), (leaves, ranks)


def fold_from_the_left(left: Node, right: Node, leaves: int) -> bool:
    """Siblings if what is left over at the end were added from the left."""
    size = left[1] - left[0]
    return left[1] == right[0] and ((left[0] % (2 * size) == 0 and right[1] - right[0] == size) or right[1] == leaves)


def incomplete(left: Node, right: Node, leaves: int) -> bool:
    """Siblings if a rank added its neighbours, whether their node is complete within its block or not."""
    return left[1] == right[0]


@pytest.mark.parametrize("fault", [fold_from_the_left, incomplete])
def test_fault_in_the_rule_depends_on_the_world_size(
    fault: Callable[[Node, Node, int], bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tree, "are_siblings", fault)
    roots = set()
    for ranks in range(1, 5):
        parts = [range(7 * rank // ranks, 7 * (rank + 1) // ranks) for rank in range(ranks)]
        roots.add(brought_together(parts, 7))
    assert written(0, 7) not in roots or len(roots) > 1


def test_every_block_is_at_most_the_ceiling_and_holds_a_leaf():
    for leaves in range(1, MOST + 1):
        for ranks in range(1, min(leaves, RANKS) + 1):
            dealt = blocks(leaves, ranks)
            assert dealt[0].start == 0 and dealt[-1].stop == leaves and len(dealt) == ranks
            assert all(left.stop == right.start for left, right in pairwise(dealt))
            assert all(1 <= len(block) <= ceil(leaves / ranks) for block in dealt)


def test_number_of_sets_that_live_at_once_is_bounded():
    for leaves in range(1, MOST + 1):
        for ranks in range(1, min(leaves, RANKS) + 1):
            for block in {*blocks(leaves, ranks), *even_blocks(leaves, ranks)}:
                nodes, most = added(block, leaves)
                assert most <= 2 * ceil(log2(len(block) + 1)), (leaves, ranks, block)
                assert [node for node, _ in nodes] == nodes_of(block, leaves)


def even_blocks(leaves: int, ranks: int) -> list[range]:
    """Blocks of one size as far as can be, wherever their borders fall."""
    return [range(leaves * rank // ranks, leaves * (rank + 1) // ranks) for rank in range(ranks)]


def test_no_other_borders_leave_fewer_nodes():
    """All ways to cut are tried, for small numbers; for larger ones, blocks of one size."""

    def left(parts: Sequence[range], leaves: int) -> int:
        return sum(len(nodes_of(part, leaves)) for part in parts)

    def all_ways(first: int, leaves: int, ranks: int, most: int) -> list[list[range]]:
        if ranks == 0:
            return [[]] if first == leaves else []
        stops = range(first + 1, min(first + most, leaves) + 1)
        return [[range(first, stop), *rest] for stop in stops for rest in all_ways(stop, leaves, ranks - 1, most)]

    for leaves in range(1, 13):
        for ranks in range(1, min(leaves, 5) + 1):
            ways = all_ways(0, leaves, ranks, ceil(leaves / ranks))
            assert left(blocks(leaves, ranks), leaves) == min(left(way, leaves) for way in ways), (leaves, ranks)
    for leaves in range(1, MOST + 1):
        for ranks in range(1, min(leaves, RANKS) + 1):
            assert left(blocks(leaves, ranks), leaves) <= left(even_blocks(leaves, ranks), leaves)


def test_aligned_blocks_leave_one_node_each():
    for leaves, ranks in ((8, 1), (8, 2), (8, 8), (64, 4), (6, 3), (12, 3)):
        assert all(len(nodes_of(block, leaves)) == 1 for block in blocks(leaves, ranks)), (leaves, ranks)


def test_nodes_may_come_in_any_order():
    for order in permutations(nodes_of(range(1, 7), 7)):
        assert joined([*order, (0, 1)], 7) == [(0, 7)]


def test_all_leaves_at_once_are_added_as_one_by_one():
    for leaves in range(1, 40):
        values = torch.randn(leaves, 33, generator=torch.Generator().manual_seed(leaves))
        nodes: list[tuple[Node, torch.Tensor]] = []
        for leaf, value in enumerate(values):
            push(nodes, (leaf, leaf + 1), value.clone(), leaves, torch.Tensor.add_)
        ((_, root),) = nodes
        assert torch.equal(total(values), root)
    assert not torch.equal(values.sum(0), root)  # another order is another result here
