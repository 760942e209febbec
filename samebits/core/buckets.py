"""Gradients that travel together: a bucket holds its nodes of the tree, and sends them as one vector cut into parts."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .shards import aligned
from .transport import Sent, Transport
from .tree import Node, push

BUCKET = 1 << 22  # elements: 16 MiB of float32 per exchange, large enough to hide latency
HALVES = (torch.bfloat16, torch.float16)  # too short to be added in


class Bucket:
    """Parameters of one dtype whose gradients travel together, as one vector that is cut into the ranks' parts.

    Attributes:
        places: where each of the tensors begins in the vector.
        width: elements of a part.
        is_half: whether the gradients are added in float32, for their own format is too short.
        nodes: of the tree, from left to right, with the gradients of all tensors.
        left: the gradients of a left sibling, to which autograd is to add those of the right one.
        accumulates: whether autograd may add siblings by itself, in `.grad`.
        missing: how many tensors the micro-batch under way has not given a gradient yet.
        filled: whether the last micro-batch of the step is in it.
    """

    def __init__(self, tensors: Sequence[Tensor], transport: Transport) -> None:
        self.tensors, self.dtype = tensors, tensors[0].dtype
        self.is_half = self.dtype in HALVES
        unit, at, self.places = aligned(self.dtype), 0, list[int]()
        for tensor in tensors:
            self.places.append(at)
            at += -(-tensor.numel() // unit) * unit  # an optimizer's vectors begin alike in a part and in the whole
        self.width = max(1, -(-at // (transport.parts * unit))) * unit
        self.nodes: list[tuple[Node, list[Tensor]]] = []
        self.left: list[Tensor] = []
        self._lent: dict[int, tuple[int, int]] = {}
        self.accumulates, self.missing, self.filled = False, 0, False

    def look_for_hooks(self) -> None:
        """A step begins. A hook of the owner's is to see the gradient of one micro-batch, on any world size."""
        hooks: list[Any] = [tensor._post_accumulate_grad_hooks for tensor in self.tensors]
        self.accumulates = not self.is_half and all(len(held) == 1 for held in hooks)  # the one of `Accumulation`

    def take(self) -> list[Tensor]:
        """Take the gradients out of `.grad`, so that a loop that drops gradients drops none of these."""
        gradients: list[Tensor] = []
        for tensor in self.tensors:
            gradient, tensor.grad = tensor.grad, None
            assert gradient is not None
            gradients.append(gradient.float() if self.is_half else gradient)
        return gradients

    def lend(self) -> None:
        """Give autograd the gradients of the left sibling, if there is one, for the backward pass of the right one."""
        for tensor, gradient in zip(self.tensors, self.left or repeat(None), strict=False):
            tensor.grad = gradient
        # Ids, because a reference would keep the memory of these gradients.
        pairs = zip(self.tensors, self.left, strict=False)
        self._lent = {id(tensor): (id(gradient), gradient._version) for tensor, gradient in pairs}
        self.left = []

    def has_gradient(self, tensor: Tensor) -> bool:
        """Return True if autograd has written a gradient of this micro-batch, and not only left that of the sibling."""
        gradient = tensor.grad
        return gradient is not None and self._lent.get(id(tensor)) != (id(gradient), gradient._version)

    def push(self, node: Node, leaves: int) -> None:
        """Take the gradients as a node, and add what has become complete."""
        push(self.nodes, node, self.take(), leaves, _add)

    def send(self, transport: Transport) -> None:
        """Send the owners their parts of all nodes."""
        (_, (like, *_)), *_ = self.nodes
        room, size = transport.room(self.width, like), self.width
        for number, (_, gradients) in enumerate(self.nodes):
            into, values = list[Tensor](), list[Tensor]()
            for gradient, at in zip(gradients, self.places, strict=True):
                flat, stop = gradient.reshape(-1), at + gradient.numel()
                for rank in range(at // size, -(-stop // size)):
                    first, last = max(at, rank * size), min(stop, (rank + 1) * size)
                    into.append(room[rank, number, first - rank * size : last - rank * size])
                    values.append(flat[first - at : last - at])
            torch._foreach_copy_(into, values)
        self.nodes = []
        self._sent: Sent = transport.start(room)

    def root(self, transport: Transport) -> Tensor:
        """Wait for what was sent, and return this rank's part of the root, in the parameters' dtype."""
        ((_, root),) = transport.finish(self._sent)
        del self._sent
        return root.to(self.dtype)


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def buckets_of(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in a row, of one dtype, in the order in which the backward pass is likely to finish."""
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or size + tensor.numel() > BUCKET or tensor.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets
