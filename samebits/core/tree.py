"""One binary tree of additions, whatever the world size: pure descriptions, without tensors and without ranks' traffic.

The micro-batches of a global batch are the leaves of a perfect binary tree that is cut off behind the last of them.
A node is its left child + its right child; where the right one is cut off, it is its left child itself:

    7 leaves    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

So the leaves alone decide which numbers are added, and in which order. Who adds them is free: a rank adds each node
whose leaves are all its own, and the nodes that are left travel to whoever adds the rest.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Node = tuple[int, int]  # the first leaf below it, and the one behind the last
T = TypeVar("T")
WINDOW = 16  # leaves: more would take seconds, with a thousand ranks and a million leaves


def are_siblings(left: Node, right: Node, leaves: int) -> bool:
    """Whether these two nodes of a tree of so many leaves are the children of one node, in this order."""
    size = left[1] - left[0]
    fills = right[1] - right[0] == size or right[1] == leaves
    return left[1] == right[0] and left[0] % (2 * size) == 0 and fills


def push(nodes: list[tuple[Node, T]], node: Node, value: T, leaves: int, add: Callable[[T, T], T]) -> None:
    """Append a node to those on its left; while the last two are siblings, `add(left, right)` takes their place."""
    while nodes and are_siblings(nodes[-1][0], node, leaves):
        (first, _), left = nodes.pop()
        node, value = (first, node[1]), add(left, value)
    nodes.append((node, value))


def joined(nodes: Sequence[Node], leaves: int) -> list[Node]:
    """The nodes that are left once all siblings among these are added; they may come in any order."""
    left: list[tuple[Node, None]] = []
    for node in sorted(nodes):
        push(left, node, None, leaves, lambda *_: None)
    return [node for node, _ in left]


def nodes_of(mine: Sequence[int], leaves: int) -> list[Node]:
    """The nodes that a rank with these leaves adds by itself: the largest ones that hold no other leaf."""
    return joined([(leaf, leaf + 1) for leaf in mine], leaves)


@cache
def blocks(leaves: int, ranks: int) -> list[range]:
    """The leaves of each rank: blocks of at most ceil(leaves / ranks), with the fewest nodes that are left in all.

    Each node that is left travels; so fewer nodes are fewer bytes, and no rank works longer for it. Borders are looked
    for among the `WINDOW` earliest ones, which are all of them where ranks are no more.
    """
    most = -(-leaves // ranks)
    fewest, borders = {0: 0}, list[dict[int, int]]()  # by where the ranks so far end: nodes; and where the last begins
    for others in reversed(range(ranks)):
        ends: dict[int, tuple[int, int]] = {}
        for first, count in fewest.items():
            last = min(first + most, leaves - others, max(ranks - others, leaves - others * most) + WINDOW)
            for stop in range(max(first + 1, leaves - others * most), last + 1):
                found = count + _count(first, stop, leaves), first
                ends[stop] = min(ends.get(stop, found), found)
        fewest = {stop: count for stop, (count, _) in ends.items()}
        borders.append({stop: first for stop, (_, first) in ends.items()})
    found_blocks, stop = list[range](), leaves
    for begins in reversed(borders):
        found_blocks.append(range(begins[stop], stop))
        stop = begins[stop]
    return found_blocks[::-1]


@cache
def _count(first: int, stop: int, leaves: int) -> int:
    """How many nodes are left of a block."""
    count = 0
    while first < stop:
        size = first & -first or 1 << leaves.bit_length()  # of the largest node that begins here
        while min(first + size, leaves) > stop:
            size //= 2
        first, count = min(first + size, leaves), count + 1
    return count


def total(leaves: Tensor) -> Tensor:
    """The root over the first dimension of a tensor, which holds all leaves: level by level, in one call each."""
    while len(leaves) > 1:
        even = len(leaves) // 2 * 2
        added = leaves[0:even:2] + leaves[1:even:2]
        leaves = torch.cat([added, leaves[even:]]) if even < len(leaves) else added
    return leaves[0]
