"""`parallel.reduce: ddp`: DistributedDataParallel sums the gradients, and the world size decides the bits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..asked.settings import Parallel
from .buffers import Buffers
from .turns import Turns
from .world import ALONE, World


class Stock:
    """Used as `parallel.OrderFree`; there is one all-reduce per step."""

    in_pieces, doubted, replicas = False, False, ALONE

    def __init__(self, module: nn.Module, settings: Parallel, world: World) -> None:
        # find_unused_parameters keeps DDP from rebuilding its buckets after the first step, which would
        # make a resumed run differ from an uninterrupted one.
        self.module = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        self.world, self.total_shards = world, settings.shards
        self.buffers = Buffers(module, settings.shards, world)
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._turns = Turns(module)
        self._called = False
        self.module.register_forward_pre_hook(self._call)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._turns.take) for parameter in trainable]

    def _call(self, module: nn.Module, inputs: object) -> None:
        self._called = True

    def shards(self, mine: Sequence[int], measures: bool = False, rechecks: bool = False) -> Iterator[int]:
        """As `OrderFree.shards`, without a grid to measure; gradients of all but the last shard only accumulate."""
        self._turns.begin(mine)
        self.module.zero_grad(set_to_none=True)
        self._loss.zero_()
        self.buffers.begin()
        for shard in mine:
            self._shard = shard
            with nullcontext() if shard == mine[-1] else self.module.no_sync():
                yield shard
            self._turns.require(shard)

    def add(self, compute: Callable[[], Tensor], twice: bool = False) -> None:
        """As `OrderFree.add`, always once; DDP divides by the world size, hence the factor."""
        self._turns.add(self._shard)
        self._called = False
        loss = compute()
        self._loss += loss.detach() / self.total_shards
        with self._turns.backward():
            if loss.requires_grad and self._called:  # the bare module knows nothing of the other ranks
                (loss * (self.world.size / self.total_shards)).backward()

    def reduce(self) -> Tensor:
        """As `OrderFree.reduce`; the lead's buffers win, as in DDP itself."""
        self._turns.end()
        for buffer in self.module.buffers():
            self.world.broadcast(buffer)
        self.world.sum(self._loss)
        return self._loss.clone()

    def told(self) -> None:
        """Nothing: there is no grid."""

    def end(self) -> None:
        """As `OrderFree.end`, but for DDP's own."""
        for hook in self._hooks:
            hook.remove()

    def discard(self) -> None:
        """As `OrderFree.discard`."""
        self.buffers.restore()
        self.module.zero_grad(set_to_none=True)
