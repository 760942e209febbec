"""`parallel.reduce: ddp`: DistributedDataParallel sums the gradients, and the world size decides the bits."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .buffers import Buffers
from .guard import Guard
from .options import Parallel
from .ranks import ALONE, World
from .state import State
from .transport import Transport
from .tree import blocks


class DDP:
    """Used as `accumulate.Accumulation`; there is one all-reduce per step."""

    sharded, replicas = False, ALONE

    def __init__(self, state: State, settings: Parallel, world: World) -> None:
        module = state.model
        # find_unused_parameters keeps DDP from rebuilding its buckets after the first step, which would
        # make a resumed run differ from an uninterrupted one.
        self.module = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        self.world, self.total = world, settings.micro_batches
        self.leaves = blocks(self.total, world.size)
        self.buffers = Buffers(module, self.total, world, Transport([], [], self.total))
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._guard = Guard(module)
        self._called = False
        self.module.register_forward_pre_hook(self._call)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._guard.take) for parameter in trainable]

    def _call(self, module: nn.Module, inputs: object) -> None:
        self._called = True

    def micro_batches(self, rechecked: int | None = None) -> Iterator[int]:
        """As `Accumulation.micro_batches`; all gradients but the last only accumulate, and none is rechecked."""
        mine = self.leaves[self.world.rank]
        self._guard.begin(mine)
        self.module.zero_grad(set_to_none=True)
        self._loss.zero_()
        self.buffers.begin()
        for number in mine:
            self._number = number
            with nullcontext() if number == mine[-1] else self.module.no_sync():
                yield number
            self._guard.require(number)

    def add(self, compute: Callable[[], Tensor]) -> None:
        """As `Accumulation.add`; DDP divides by the world size, hence the factor."""
        self._guard.add(self._number)
        self._called = False
        loss = compute()
        self._loss += loss.detach() / self.total
        with self._guard.backward():
            if loss.requires_grad and self._called:  # the bare module knows nothing of the other ranks
                (loss * (self.world.size / self.total)).backward()

    def reduce(self) -> Tensor:
        """As `Accumulation.reduce`; rank 0's buffers win, as in DDP itself."""
        self._guard.end()
        for buffer in self.module.buffers():
            self.world.broadcast(buffer)
        self.world.sum(self._loss)
        return self._loss.clone()

    def end(self) -> None:
        """As `Accumulation.end`, but for DDP's own."""
        for hook in self._hooks:
            hook.remove()

    def discard(self) -> None:
        """As `Accumulation.discard`."""
        self.buffers.restore()
        self.module.zero_grad(set_to_none=True)
