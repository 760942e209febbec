"""Which way of summing gradients a run has."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from .accumulate import Accumulation
from .alike import together
from .ddp import DDP
from .fsdp import Full
from .optimizers import Optimizers
from .options import Parallel
from .ranks import World
from .shardable import require_elementwise
from .sharded import Owned


def gradients_of(
    module: nn.Module,
    settings: Parallel,
    world: World,
    optimizers: Optimizers | None = None,
    units: Sequence[nn.Module] = (),
) -> Accumulation | DDP:
    """The way that `parallel.reduce` and `parallel.shard` name; alone, a rank has nothing to share."""
    if settings.reduce == "ddp":
        return DDP(module, settings, world)
    if settings.shard == "none" or world.size == 1 or optimizers is None:
        return Accumulation(module, settings, world)
    for optimizer in optimizers.all:
        together(world, partial(require_elementwise, optimizer))
    if settings.shard == "optimizer":
        return Owned(module, settings, world, optimizers)
    return Full(module, settings, world, optimizers, units)
