"""`parallel.shard`: gradients, optimizer state and weights in shards, with the bits of `Accumulation`.

    none        every rank holds all
    optimizer   a rank holds the weights, and adds up and updates its own shard of each parameter
    full        a rank holds its rows of each weight; FSDP2 gathers those of a unit while they are needed (fsdp.py)

The bits are the same because nothing depends on where a tensor is cut: the tree adds each element by itself, an
optimizer updates each element by itself (`shardable.require_elementwise`), and shards begin where its vectors begin.
Parameters whose rows are no whole vectors stay unsharded under `full`, as biases and norms do.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .accumulate import Accumulation
from .errors import UserError, some
from .options import Parallel
from .ranks import World
from .shards import Scattered, Shard
from .state import State


class Owned(Accumulation):
    """`parallel.shard: optimizer`: as `Accumulation`, but each rank gets, and updates, a shard of each parameter.

    It is what the rank owns of a bucket. After each step of an optimizer the ranks gather the weights.
    """

    sharded = True

    def __init__(self, state: State, settings: Parallel, world: World) -> None:
        if odd := [name for name, p in state.parameters.items() if not p.is_contiguous()]:
            raise UserError(f"{some(odd, 3)}: not contiguous, which parallel.shard=optimizer wants; use .contiguous()")
        super().__init__(state, settings, world)
        self._shards: dict[Tensor, Shard] = {}
        self._mine: list[list[slice]] = []  # of each bucket: where this rank's shard of each tensor lies in its part
        for bucket in self._buckets:
            first, mine = bucket.width * world.rank, list[slice]()
            for tensor, at in zip(bucket.tensors, bucket.places, strict=True):
                edges = [min(max(bucket.width * rank - at, 0), tensor.numel()) for rank in range(world.size + 1)]
                start, stop = edges[world.rank : world.rank + 2]
                self._shards[tensor] = Shard(tensor.detach().view(-1)[start:stop], edges, tensor.shape, world)
                mine.append(slice(at + start - first, at + stop - first) if start < stop else slice(0))
            self._mine.append(mine)
        self._updated = state.optimizers.cut(self._shards)
        self._watches = [optimizer.register_step_post_hook(self._gather) for optimizer in state.optimizers.all]

    def _give(self) -> None:
        for bucket, mine in zip(self._buckets, self._mine, strict=True):
            part = bucket.root(self._transport)
            for tensor, here in zip(bucket.tensors, mine, strict=True):
                place_gradient(tensor, self._shards[tensor].of(part[here]), self._updated)

    def _gather(self, *call: Any) -> None:
        """An optimizer has made its step: give every rank the new weights."""
        for bucket, mine in zip(self._buckets, self._mine, strict=True):
            part = bucket.tensors[0].new_zeros(bucket.width)
            for tensor, here in zip(bucket.tensors, mine, strict=True):
                part[here] = self._shards[tensor].local
            weights, work = self._transport.gather(part)
            self.world.wait(work)
            for tensor, at in zip(bucket.tensors, bucket.places, strict=True):
                tensor.detach().view(-1).copy_(weights[at : at + tensor.numel()])

    def end(self) -> None:
        """As `Accumulation.end`."""
        super().end()
        for watch in self._watches:
            watch.remove()


def place_gradient(parameter: Tensor, gradient: Shard, updated: Mapping[Tensor, Tensor]) -> None:
    """Leave a gradient's shard where the loop looks for it, and where the optimizer does."""
    parameter.grad = Scattered(gradient)
    if parameter in updated:
        updated[parameter].grad = gradient.local
