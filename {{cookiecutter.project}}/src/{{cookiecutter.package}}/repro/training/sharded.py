"""`parallel.shard`: gradients, optimizer state and weights in pieces, with the bits of `parallel.OrderFree`.

    none        every rank holds all
    optimizer   a rank holds the weights, and sums and updates its own piece of each parameter
    full        a rank holds its rows of each weight; FSDP2 gathers those of a unit while they are needed

The bits are the same because nothing depends on where a tensor is cut: the sums are those of whole numbers, an
optimizer updates each element by itself (`divisible.require_elementwise`), and pieces begin where its vectors begin.
Parameters whose rows are no whole vectors stay whole under `full`, as biases and norms do.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..asked.settings import Parallel
from ..differences import some
from ..errors import Failure, Refused
from .digest import tensor_digest
from .divisible import kept_whole, require_own, require_untied
from .gather import Gather, Room, rounded
from .optimizers import Optimizers
from .parallel import OrderFree
from .pieces import Piece, Scattered, aligned, piece_of
from .world import World

Compute = Callable[[], Tensor]


class Owned(OrderFree):
    """`parallel.shard: optimizer`: as `OrderFree`, but each rank gets, and updates, a piece of each parameter.

    A bucket is cut into equal parts, one for each rank. After each step of an optimizer the ranks gather the weights.
    """

    in_pieces = True

    def __init__(self, module: nn.Module, settings: Parallel, world: World, optimizers: Optimizers) -> None:
        if odd := [name for name, p in module.named_parameters() if not p.is_contiguous()]:
            raise Refused(f"{some(odd, 3)}: not contiguous, which parallel.shard=optimizer wants; use .contiguous()")
        super().__init__(module, settings, world)
        self._pieces: dict[Tensor, Piece] = {}
        self._places: list[list[tuple[Tensor, int, slice]]] = []  # by bucket: a tensor, its place there, and in my part
        for tensors, sums in zip(self._buckets, self._sums, strict=True):
            part, at = sums.numel() // world.size, 0
            first = part * world.rank
            self._places.append([])
            for tensor, size in zip(tensors, self._sizes(tensors), strict=False):
                edges = [min(max(part * rank - at, 0), tensor.numel()) for rank in range(world.size + 1)]
                start, stop = edges[world.rank : world.rank + 2]
                self._pieces[tensor] = Piece(tensor.detach().view(-1)[start:stop], edges, tensor.shape, world)
                mine = slice(at + start - first, at + stop - first) if start < stop else slice(0)
                self._places[-1].append((tensor, at, mine))
                at += size
        self._updated = optimizers.cut(self._pieces)
        self._parts: list[Tensor] = []
        self._watches = [optimizer.register_step_post_hook(self._gather) for optimizer in optimizers.all]

    def _sizes(self, tensors: Sequence[Tensor]) -> list[int]:
        unit = aligned(tensors[0].dtype)
        sizes = [-(-tensor.numel() // unit) * unit for tensor in tensors]
        return [*sizes, -sum(sizes) % (self.world.size * unit)]  # the last is room that is left

    def _send(self) -> None:
        sums = self._sums[len(self._works)]
        self._parts.append(sums.new_empty(sums.numel() // self.world.size))
        self._works.append(self.world.scatter(sums, self._parts[-1], asynchronous=True))

    def _give(self) -> None:
        parts, self._parts = self._parts, []
        for places, part in zip(self._places, parts, strict=True):
            for tensor, _, mine in places:
                gradient = self._pieces[tensor].of(self._value(part[mine], tensor))
                _give(tensor, gradient, self._updated)

    def _gather(self, *call: Any) -> None:
        """An optimizer has made its step: give every rank the new weights."""
        for places, sums in zip(self._places, self._sums, strict=True):
            part = places[0][0].new_zeros(sums.numel() // self.world.size)
            for tensor, _, mine in places:
                part[mine] = self._pieces[tensor].local
            weights = part.new_empty(sums.numel())
            self.world.join(part, weights)
            for tensor, at, _ in places:
                tensor.detach().view(-1).copy_(weights[at : at + tensor.numel()])

    def _holders(self) -> Sequence[Tensor]:
        return [*self._parameters, *self._updated.values()]

    def end(self) -> None:
        """As `OrderFree.end`."""
        super().end()
        for watch in self._watches:
            watch.remove()


def _give(parameter: Tensor, gradient: Piece, updated: Mapping[Tensor, Tensor]) -> None:
    """Leave a gradient's piece where the loop looks for it, and where the optimizer does."""
    parameter.grad = Scattered(gradient)
    if parameter in updated:
        updated[parameter].grad = gradient.local


class Full(OrderFree):
    """`parallel.shard: full`: FSDP2, whose reduce-scatter rounds and adds as `OrderFree` does.

    A rank that has fewer shards than another makes empty passes, because FSDP2 communicates in each one. With
    `parallel.replicas`, groups of ranks hold the whole each, and add their sums at the end of a step.
    """

    in_pieces = True
    early = False  # FSDP2 communicates until the last pass, in which ranks may run no shard

    def __init__(
        self, module: nn.Module, settings: Parallel, world: World, optimizers: Optimizers, units: Sequence[nn.Module]
    ) -> None:
        require_own(module, units)
        require_untied(module, units)
        self._within, self.replicas = world.split(settings.replicas, timedelta(seconds=settings.timeout_seconds))
        short = rounded(module) if settings.gather == "bfloat16" else {}
        self.doubted, self._made = bool(short), 0
        watches = self._cut_units(module, units, optimizers, short)
        super().__init__(module, settings, world)
        self._cut = [p for p in module.parameters() if p.requires_grad and isinstance(p, DTensor)]
        self._hooks += [parameter.register_post_accumulate_grad_hook(self._take_piece) for parameter in self._cut]
        self._hooks += watches
        self._updated = optimizers.cut({parameter: piece_of(parameter) for parameter in self._cut})
        if world.leads:
            print(_told(module, units), file=sys.stderr, flush=True)

    def _cut_units(
        self, module: nn.Module, units: Sequence[nn.Module], optimizers: Optimizers, short: Mapping[nn.Module, str]
    ) -> list[RemovableHandle]:
        """Apply FSDP2 to each unit, and to what the module holds beside them; a model on the CPU moves unit by unit.

        Returns:
            What watches the modules whose weights travel in bfloat16, which are `short`.
        """
        world, whole = self._within, kept_whole(module)
        for tensor in [*whole, *module.buffers()]:
            tensor.data = tensor.data.to(world.device)
        mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, world.group or dist.group.WORLD), world.device.type)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        watches = []
        for unit in [*units, module]:
            names = [
                (owner, name) for owner, name, p in _managed(unit) if p not in whole and not isinstance(p, DTensor)
            ]
            if not names and unit is not module:
                continue
            before = [getattr(owner, name) for owner, name in names]
            sent = {getattr(owner, name): name == "weight" and owner in short for owner, name in names}
            widths = [-(-p.shape[0] // world.size) * (p.numel() // p.shape[0]) for p in sent]
            gather = Gather(
                world,
                widths,
                list(sent.values()),
                lambda: self._turns.propagating,
                lambda: self.doubted and self._made == 1,
            )
            watches += [
                gather.watch(owner, short[owner]) for owner, name in names if name == "weight" and owner in short
            ]
            try:
                sharded = fully_shard(
                    unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole
                )
            except ValueError as error:  # such as a container that cannot be called
                said = " ".join(str(error).split())[:120]
                raise Refused(f"parallel.shard=full: {said}; set shard=optimizer") from None
            # nothing may hold the whole ones any longer
            optimizers.replace({old: getattr(owner, name) for old, (owner, name) in zip(before, names, strict=True)})
            del before, sent
            parameters = dict.fromkeys(getattr(owner, name) for owner, name in names)
            trainable = {p: width for p, width in zip(parameters, widths, strict=True) if p.requires_grad}
            reduction = _Unit(self._reduce, list(trainable), list(trainable.values()))
            sharded.set_custom_reduce_scatter(cast(Any, reduction))
            sharded.set_custom_all_gather(cast(Any, gather))
            sharded.set_gradient_divide_factor(1.0)  # the loss is divided; and another factor divides float64 twice
            sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_reduce_scatter_unused_params(True)
        return watches

    def shards(self, mine: Sequence[int], measures: bool = False, rechecks: bool = False) -> Iterator[int]:
        """As `OrderFree.shards`."""
        self._passes, self._made = -(-self.total_shards // self.world.size) + rechecks, 0
        return super().shards(mine, measures, rechecks)

    def _backpropagate(self, compute: Compute) -> Tensor:
        self._made += 1
        self._latest = compute
        return super()._backpropagate(compute)

    def _reduce(self, unit: "_Unit", given: Tensor, out: Tensor) -> None:
        """Add a unit's gradients, (ranks, elements) of float64, over the ranks and to those of the passes before."""
        parts = given.view(self._within.size, -1).split(unit.widths, 1)
        if self._twice:
            self._digests |= {p: tensor_digest(part) for p, part in zip(unit.parameters, parts, strict=True)}
        if self._trial:
            given.zero_()
        else:
            values = [part.clone() for part in parts] if self._resolution.measures else []
            for part in given.view(-1).split(self._chunk):
                self._multiples(part, in_place=True)
            for parameter, value, multiples in zip(unit.parameters, values, parts, strict=False):
                self._resolution.take(parameter, value, multiples.reshape(-1))
        part = torch.empty_like(out)
        self._within.scatter(given, part)
        unit.sum = part if unit.sum is None else unit.sum.add_(part)
        if self._made < self._passes:
            out.zero_()
        else:
            self.replicas.sum(unit.sum)
            out.copy_(unit.sum).mul_(2.0**self._lsb)
            unit.sum = None

    def _take_piece(self, parameter: Tensor) -> None:
        """FSDP2 calls this in each pass; the gradient is that of the step in the last one, and zeros before."""
        self._turns.take(parameter)
        if self._made < self._passes:
            parameter.grad = None

    def reduce(self) -> Tensor:
        """As `OrderFree.reduce`, after the passes that other ranks still make."""
        self._turns.end()
        self._trial, self._twice = True, False
        while self._made < self._passes:
            self.buffers.restore()
            self._backpropagate(self._latest)
        self.doubted = False
        return super().reduce()

    def _difference(self, seen: str) -> Failure:
        if not self.doubted:
            return super()._difference(seen)
        return Refused(
            f"parallel.gather=bfloat16: where all weights are sent in float32, {seen}. The model uses a weight beside "
            f"its own module; set parallel.gather=float32",
            local=True,
        )

    def _give(self) -> None:
        super()._give()
        for parameter in self._cut:
            gradient = cast(DTensor, parameter.grad).to_local().reshape(-1)
            _give(parameter, piece_of(parameter).of(gradient), self._updated)

    def _holders(self) -> Sequence[Tensor]:
        return [*self._parameters, *self._cut, *self._updated.values()]


@dataclass
class _Unit(Room):
    """The reduce-scatter of a unit, as FSDP2 calls it.

    Attributes:
        reduce: does the work.
        parameters: the trainable ones, in FSDP2's order.
        widths: how many elements of each a rank holds, or would if the last rank had as many.
        sum: this rank's part, over the passes of the step so far.
    """

    reduce: Callable[["_Unit", Tensor, Tensor], None]
    parameters: list[Tensor]
    widths: list[int]
    sum: Tensor | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.reduce(self, input_tensor, output_tensor)


def _managed(unit: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters of a unit with their places, in FSDP2's order: those of children first."""
    for child in unit.children():
        yield from _managed(child)
    for name, parameter in unit.named_parameters(recurse=False):
        yield unit, name, parameter


def _told(module: nn.Module, units: Sequence[nn.Module]) -> str:
    """A line on what lies in pieces, and on what is gathered at a time."""
    names = {held: name for name, held in module.named_modules()}
    cut = sum(parameter.numel() for parameter in module.parameters() if isinstance(parameter, DTensor))
    share = cut / max(1, sum(parameter.numel() for parameter in module.parameters()))
    return (
        f"parallel.shard=full: {share:.1%} of the weights lie in pieces; gathered one at a time: "
        f"{some([names[unit] for unit in units], 3) if units else 'nothing, the model has no list of modules'}"
    )
