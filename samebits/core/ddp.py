"""`parallel.reduce: ddp`: DistributedDataParallel sums the gradients, and the world size decides the bits."""

import types
from collections.abc import Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from .buffers import Buffers
from .errors import UserError
from .guard import Guard
from .options import Parallel
from .ranks import ALONE, World
from .state import State
from .transport import Transport
from .tree import blocks


class DDP:
    """Used as `accumulate.Accumulation`; there is one all-reduce per sum.

    The loop calls its own model, not a wrapper: in the turn of a micro-batch, its forward pass goes through a
    DistributedDataParallel.
    """

    sharded, replicas = False, ALONE

    def __init__(self, state: State, settings: Parallel, world: World) -> None:
        self.module = module = state.model
        # find_unused_parameters keeps DDP from rebuilding its buckets after the first step, which would
        # make a resumed run differ from an uninterrupted one.
        self._ddp = nn.parallel.DistributedDataParallel(_Inner(module), find_unused_parameters=True)
        self.world, self.total = world, settings.micro_batches
        self.leaves = blocks(self.total, world.size)
        self.buffers = Buffers(module, self.total, world, Transport([], [], self.total))
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._guard = Guard(module)
        self._in_turn = self._called = False
        self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._guard.take) for parameter in self._trainable]
        self._class = type(module)
        module.__class__ = self._routed()

    def _routed(self) -> type[nn.Module]:
        """The model's class, but for this one object: its forward pass goes through DistributedDataParallel."""
        way, its = self, self._class

        @wraps(its.forward)
        def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
            if self is not way.module or not way._in_turn or not self.training:
                return its.forward(self, *args, **named)
            way._in_turn, way._called = False, True  # the module inside is this one again
            try:
                return way._ddp(*args, **named)
            finally:
                way._in_turn = True

        def reduced(self: nn.Module, protocol: Any) -> Any:
            """A copy, and a pickle, are of the model's own class."""
            there, self.__class__ = type(self), its
            try:
                return self.__reduce_ex__(protocol)
            finally:
                self.__class__ = there

        names = {name: getattr(its, name) for name in ("__module__", "__qualname__", "__doc__")}
        names |= {"forward": forward, "__reduce_ex__": reduced}
        return types.new_class(its.__name__, (its,), {}, lambda space: space.update(names))

    def micro_batches(self, rechecked: int | None = None, further: bool = False) -> Iterator[int]:
        """As `Accumulation.micro_batches`; all gradients but the last only accumulate, and none is rechecked."""
        mine = self.leaves[self.world.rank]
        self._guard.begin(mine)
        self._drop()
        self._loss.zero_()
        self.buffers.begin()
        self._further, self._used, self._held = further, set[int](), self._gradients()
        for number in mine:
            self._guard.turn(number)
            self._in_turn, self._called = True, False
            with nullcontext() if number == mine[-1] else self._ddp.no_sync():
                yield number
            self._in_turn = False
            self._guard.require(True)

    def add(self, loss: Tensor) -> None:
        """As `Accumulation.add`; DDP divides by the world size, hence the factor."""
        self._guard.add()
        self._require_held()
        self._loss += loss.detach() / self.total
        with self._guard.backward():
            if loss.requires_grad and self._called:  # another forward pass knows nothing of the other ranks
                (loss * (self.world.size / self.total)).backward()
        self._held = self._gradients()
        self._used |= self._guard.taken
        self._guard.done()

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        """What the parameters hold, and how often it was written into."""
        held = [parameter.grad for parameter in self._trainable]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in held]

    def _require_held(self) -> None:
        """Refuse gradients that the loop has dropped, or written into: they hold those of the micro-batches before."""
        now = self._gradients()
        if any(a is not b or v != w for (a, v), (b, w) in zip(self._held, now, strict=True)):
            raise UserError(
                "gradients were dropped or changed inside of the loop over the step's micro-batches, which adds them "
                "up: call optimizer.zero_grad() outside of it; it is not needed"
            )

    def reduce(self) -> Tensor:
        """As `Accumulation.reduce`; rank 0's buffers win, as in DDP itself."""
        self._require_held()
        self._guard.end()
        for buffer in self.module.buffers():
            self.world.broadcast(buffer)
        self.world.sum(self._loss)
        if self._further:
            self._drop_unused()
        return self._loss.clone()

    def _drop_unused(self) -> None:
        uses = torch.tensor([id(each) in self._used for each in self._trainable], dtype=torch.int64)
        uses = uses.to(self.world.device)
        self.world.sum(uses)
        for parameter, count in zip(self._trainable, uses.tolist(), strict=True):
            if not count:
                parameter.grad = None

    def end(self) -> None:
        """As `Accumulation.end`, but for DDP's own."""
        self.module.__class__ = self._class
        for hook in self._hooks:
            hook.remove()

    def discard(self) -> None:
        """As `Accumulation.discard`."""
        self.buffers.restore()
        self._drop()

    def _drop(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None


class _Inner(nn.Module):
    """What DistributedDataParallel wraps: the model, of which only the forward pass itself is still to be made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.model.forward(*args, **named)
