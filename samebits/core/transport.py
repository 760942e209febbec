"""How the nodes of a tree travel: an all-to-all moves bits and adds nothing; who owns a part of a tensor adds the rest.

A vector is cut into as many equal parts as there are ranks. Each rank sends every owner the owner's part of each of
its nodes; the owner adds them in the order of the tree, and an all-gather gives every rank the roots of all parts. So
no collective adds a number, and no backend's order of additions matters.

Where ranks lie on several hosts, they do so twice: ranks of a host exchange and add first; then ranks of the same local
number exchange the host's nodes. The tree is the same, and a host sends its share of the bytes, not each of its ranks'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from .place import number
from .ranks import World
from .tree import Node, joined, push


@dataclass
class Sent:
    """What is on its way: the rows that arrive, (nodes of all senders, elements), and the vector that is sent."""

    rows: Tensor
    sent: Tensor
    work: dist.Work | None


class Transport:
    """Brings the nodes of a tree together, for any number of vectors.

    Attributes:
        parts: how many parts a vector is cut into; each rank owns that of its number.
    """

    def __init__(self, worlds: Sequence[World], nodes: Sequence[Sequence[Node]], leaves: int) -> None:
        """Describe the exchanges.

        Args:
            worlds: the ranks of each exchange, of which each has this one; none where a rank is alone.
            nodes: those of each rank.
            leaves: of the whole tree.
        """
        self._leaves, rank = leaves, 0
        self._sizes = [world.size for world in worlds]
        self.parts = prod(self._sizes)
        for world in reversed(worlds):
            rank = rank * world.size + world.rank
        self._levels: list[tuple[World, list[Sequence[Node]]]] = []  # the ranks, and the nodes of each
        for world in worlds:
            groups = [nodes[first : first + world.size] for first in range(0, len(nodes), world.size)]
            rank //= world.size
            self._levels.append((world, list(groups[rank])))
            nodes = [joined(list(chain(*group)), leaves) for group in groups]

    def room(self, width: int, like: Tensor) -> Tensor:
        """Room for what `start` sends: (parts, nodes, elements)."""
        ((world, nodes), *_) = self._levels
        return like.new_empty(self.parts, len(nodes[world.rank]), width)

    def start(self, sent: Tensor) -> Sent:
        """Send the filled room; every rank starts its vectors in the same order."""
        axes = len(self._sizes)
        # each rank of the first exchange gets the parts of all ranks behind it, in the order of the later exchanges
        grid = sent.view(*reversed(self._sizes), *sent.shape[1:])
        ordered = grid.permute(axes - 1, axes, *reversed(range(axes - 1)), axes + 1)
        ranks, (parts, own, width) = self._sizes[0], sent.shape
        return _exchange(*self._levels[0], ordered.reshape(ranks, own, parts // ranks * width))

    def finish(self, sent: Sent) -> list[tuple[Node, Tensor]]:
        """Return the nodes of this rank's part with all their leaves added: the root alone, if all leaves were sent."""
        left: list[tuple[Node, Tensor]] = []
        for level, (world, nodes) in enumerate(self._levels):
            if level:
                rest = sent.rows.new_empty(world.size, len(left), sent.rows.shape[1] // world.size)
                for at, (_, row) in enumerate(left):  # there may be none
                    rest[:, at] = row.view(world.size, -1)
                sent = _exchange(world, nodes, rest)
            world.wait(sent.work)
            left = []
            arrived = zip(chain(*nodes), sent.rows, strict=True)
            for node, row in sorted(arrived, key=lambda each: each[0]):
                push(left, node, row, self._leaves, Tensor.add_)
        return left

    def gather(self, part: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Give every rank the parts of all as one vector, once the work that is returned is waited for."""
        work = None
        for world, _ in reversed(self._levels):
            world.wait(work)
            gathered = part.new_empty(world.size * part.numel())
            work = world.all_gather(part.contiguous(), gathered)
            part = gathered
        if len(self._sizes) > 1:
            self._levels[0][0].wait(work)
            grid = part.view(*self._sizes, -1)
            part, work = grid.permute(*reversed(range(len(self._sizes))), -1).reshape(-1), None
        return part, work

    def sum(self, nodes: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start the sum of short vectors, one for each own node; the function that is returned gives the root."""
        if not self._levels:
            return lambda: nodes[0]
        size = nodes[0].numel()
        width = max(1, -(-size // self.parts))
        room = self.room(width, nodes[0]).zero_()
        for at, node in enumerate(nodes):
            padded = torch.cat([node, node.new_zeros(self.parts * width - size)])
            room[:, at] = padded.view(self.parts, width)
        sent = self.start(room)

        def finish() -> Tensor:
            ((_, root),) = self.finish(sent)
            whole, work = self.gather(root)
            self._levels[0][0].wait(work)
            return whole[:size]

        return finish


def _exchange(world: World, nodes: Sequence[Sequence[Node]], sent: Tensor) -> Sent:
    """Start to send (ranks, own nodes, elements), of which each rank gets its own first index."""
    _, own, width = sent.shape
    rows = sent.new_empty(sum(map(len, nodes)), width)
    work = world.all_to_all(sent, rows, [own * width] * world.size, [len(each) * width for each in nodes])
    return Sent(rows, sent, work)


def local_size(world: World) -> int:
    """How many ranks each host has, in a row; 1 where hosts have different numbers. All ranks have to ask together."""
    places = world.gather((number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)))
    size: int = max(1, places[0][1])
    return size if places == [(rank % size, size) for rank in range(world.size)] and world.size % size == 0 else 1
