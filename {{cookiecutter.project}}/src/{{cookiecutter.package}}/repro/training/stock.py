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

    sharded, doubted, replicas = False, False, ALONE

    def __init__(self, module: nn.Module, settings: Parallel, world: World) -> None:
        # find_unused_parameters keeps DDP from rebuilding its buckets after the first step, which would
        # make a resumed run differ from an uninterrupted one.
        self.module = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        self.world, self.total = world, settings.micro_batches
        self.buffers = Buffers(module, settings.micro_batches, world)
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._turns = Turns(module)
        self._called = False
        self.module.register_forward_pre_hook(self._call)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._turns.take) for parameter in trainable]

    def _call(self, module: nn.Module, inputs: object) -> None:
        self._called = True

    def micro_batches(self, mine: Sequence[int], measures: bool = False, rechecks: bool = False) -> Iterator[int]:
        """As `OrderFree.micro_batches`, without a grid to measure; all gradients but the last only accumulate."""
        self._turns.begin(mine)
        self.module.zero_grad(set_to_none=True)
        self._loss.zero_()
        self.buffers.begin()
        for micro_batch in mine:
            self._micro_batch = micro_batch
            with nullcontext() if micro_batch == mine[-1] else self.module.no_sync():
                yield micro_batch
            self._turns.require(micro_batch)

    def add(self, compute: Callable[[], Tensor], twice: bool = False) -> None:
        """As `OrderFree.add`, always once; DDP divides by the world size, hence the factor."""
        self._turns.add(self._micro_batch)
        self._called = False
        loss = compute()
        self._loss += loss.detach() / self.total
        with self._turns.backward():
            if loss.requires_grad and self._called:  # the bare module knows nothing of the other ranks
                (loss * (self.world.size / self.total)).backward()

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
