"""Select the class that sums the gradients of a run."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from .accumulate import Accumulation
from .alike import together
from .fsdp import Full
from .options import Parallel
from .ranks import World
from .shardable import require_elementwise
from .sharded import Owned
from .state import State


def gradients_of(state: State, settings: Parallel, world: World, units: Sequence[nn.Module] = ()) -> Accumulation:
    """Return the sum of gradients that `parallel.shard` selects. One rank by itself has nothing to shard.

    Raises:
        UserError: `parallel.shard` is not `none`, and an optimizer cannot update shards.
    """
    if settings.shard == "none" or world.size == 1:
        return Accumulation(state, settings, world)
    for optimizer in state.optimizers.all:
        together(world, partial(require_elementwise, optimizer))
    if settings.shard == "optimizer":
        return Owned(state, settings, world)
    return Full(state, settings, world, units)
