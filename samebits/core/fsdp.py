"""`parallel.shard: full`: FSDP2 shards the weights, and adds gradients in the tree of `Accumulation`."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .accumulate import Accumulation
from .buckets import HALVES
from .digest import tensor_digest
from .errors import RunError, UserError, some
from .optimizers import Optimizers
from .options import Parallel
from .ranks import World
from .reductions import refuse_reductions
from .shardable import kept_unsharded, require_unhooked, units_of
from .sharded import place_gradient
from .shards import shard_of
from .state import State
from .transport import Transport, local_size
from .tree import Node, nodes_of, push


class Full(Accumulation):
    """`parallel.shard: full`: FSDP2, whose reduce-scatter adds in the tree.

    Pass p of rank r is leaf p * ranks + r, so leaves arrive from left to right. A rank without a leaf in the last pass
    makes an empty one, because FSDP2 communicates in each. With `parallel.replicas`, groups of ranks hold all of the
    weights each, and leaves in a row; they exchange their nodes at the end of a step.
    """

    sharded = True
    early = False  # FSDP2 communicates until the last pass, in which ranks may run no micro-batch

    def __init__(self, state: State, settings: Parallel, world: World, units: Sequence[nn.Module]) -> None:
        module, optimizers = state.model, state.optimizers
        units = units_of(module, units)
        require_unhooked(module)
        replicas = settings.replicas
        if world.size % replicas or world.size == replicas:
            raise UserError(
                f"parallel.replicas={replicas} given with {world.size} ranks: a number wanted that divides them into "
                f"groups of 2 or more; parallel.replicas=1 fits any"
            )
        ranks, timeout = world.size // replicas, settings.timeout_seconds
        local = math.gcd(local_size(world), ranks)
        self.replicas, between, inside = world.split((replicas, ranks // local, local), timeout)
        self._within = world.split((replicas, ranks), timeout)[1]
        self._hosts = [each for each in (inside, between) if each.size > 1]
        total = settings.micro_batches  # of which each rank is to have one at least
        self._blocks = [range(total * at // replicas, total * (at + 1) // replicas) for at in range(replicas)]
        self._cut_units(module, units, optimizers)
        super().__init__(state, settings, world)
        self._cut = [p for p in module.parameters() if p.requires_grad and isinstance(p, DTensor)]
        self._hooks += [parameter.register_post_accumulate_grad_hook(self._take_shard) for parameter in self._cut]
        self._updated = optimizers.cut({parameter: shard_of(parameter) for parameter in self._cut})
        self._transport_of = cache(self._describe)
        nodes = [nodes_of(block, self.total) for block in self._blocks]
        self._allow = refuse_reductions()
        self._ends = Transport([self.replicas] if replicas > 1 else [], nodes, self.total)
        if world.is_main:
            print(_sharding(module, units), file=sys.stderr, flush=True)

    def _deal(self, settings: Parallel) -> list[list[int]]:
        """As `Accumulation._deal`: each replica has a block, of which its ranks take turns."""
        ranks = self._within.size
        return [list(block[rank::ranks]) for block in self._blocks for rank in range(ranks)]

    def _worlds(self, settings: Parallel) -> list[World]:
        return [*self._hosts, *([self.replicas] if self.replicas.size > 1 else [])]

    def _describe(self, number: int) -> Transport:
        """How the leaves of a pass travel among the ranks that hold all of the weights together."""
        first, ranks = self.replicas.rank * self._within.size, self._within.size
        leaves = [mine[number : number + 1] for mine in self.leaves[first : first + ranks]]
        return Transport(self._hosts, [nodes_of(mine, self.total) for mine in leaves], self.total)

    def _cut_units(self, module: nn.Module, units: Sequence[nn.Module], optimizers: Optimizers) -> None:
        """Apply FSDP2 to each unit, and to what the module holds beside them; a model on the CPU moves unit by unit."""
        world, unsharded = self._within, kept_unsharded(module)
        self._further, self._watched, self._seen = False, dict[int, Tensor](), set[int]()
        self._watches: list[RemovableHandle] = []
        for tensor in [*unsharded, *module.buffers()]:
            tensor.data = tensor.data.to(world.device)
        mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, world.group or dist.group.WORLD), world.device.type)
        halves = any(p.dtype in HALVES for p in module.parameters() if p not in unsharded)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if halves else None)
        for unit in [*units, module]:
            names = [
                (owner, name) for owner, name, p in _managed(unit) if p not in unsharded and not isinstance(p, DTensor)
            ]
            if not names and unit is not module:
                continue
            before = [getattr(owner, name) for owner, name in names]
            widths = [-(-p.shape[0] // world.size) * (p.numel() // p.shape[0]) for p in dict.fromkeys(before)]
            try:
                sharded = fully_shard(
                    unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=unsharded
                )
            except ValueError as error:  # such as a container that cannot be called
                said = " ".join(str(error).split())[:120]
                raise UserError(f"parallel.shard=full: {said}; set shard=optimizer") from None
            # nothing may hold the unsharded ones any longer
            optimizers.replace({old: getattr(owner, name) for old, (owner, name) in zip(before, names, strict=True)})
            del before
            parameters = dict.fromkeys(getattr(owner, name) for owner, name in names)
            places = [(owner, name, getattr(owner, name)) for owner, name in names]
            self._watches.append(unit.register_forward_pre_hook(partial(self._watch, places)))
            trainable = {p: width for p, width in zip(parameters, widths, strict=True) if p.requires_grad}
            reduction = _Unit(self._reduce, list(trainable), list(trainable.values()))
            sharded.set_custom_reduce_scatter(cast(Any, reduction))
            sharded.set_custom_all_gather(cast(Any, _Gather(world, ring=len(self._hosts) > 1)))
            sharded.set_gradient_divide_factor(1.0)  # the loss is divided
            sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_reduce_scatter_unused_params(True)

    def micro_batches(self, rechecked: int | None = None, further: bool = False) -> Iterator[int]:
        """As `Accumulation.micro_batches`. The pass of the `rechecked` one is made twice, by all ranks."""
        block, ranks = self._blocks[self.replicas.rank], self._within.size
        self._doubled = (rechecked - block[0]) // ranks if rechecked is not None and rechecked in block else -1
        self._passes, self._made = -(-len(block) // ranks) + (self._doubled >= 0), 0
        self._seen.clear()
        return super().micro_batches(rechecked, further)

    def _watch(self, places: Sequence[tuple[nn.Module, str, Tensor]], *call: Any) -> None:
        """A unit has gathered its weights: in a further sum, note which of them get a gradient, before it is reduced.

        FSDP2 makes zeros of those that a micro-batch does not use.
        """
        if not self._further:
            return
        for owner, name, sharded in places:
            gathered = getattr(owner, name)
            if gathered.requires_grad and self._watched.get(id(sharded)) is not gathered:
                self._watched[id(sharded)] = gathered
                note = partial(self._note, id(sharded))
                self._watches.append(gathered.register_post_accumulate_grad_hook(note))

    def _note(self, sharded: int, gathered: Tensor) -> None:
        self._seen.add(sharded)

    def _users(self) -> set[int]:
        return super()._users() & {id(parameter) for parameter in self._parameters} | self._seen

    def _turns(self) -> Iterator[tuple[int, bool, bool]]:
        """As `Accumulation._turns`; the passes that other ranks still make are trials of the last micro-batch."""
        yield from super()._turns()
        while self._made < self._passes:
            yield self._number, True, False

    def _is_rechecked(self, number: int) -> bool:
        return self._made == self._doubled

    def add(self, loss: Tensor) -> None:
        """As `Accumulation.add`."""
        super().add(loss)
        self._made += 1

    def _reduce(self, unit: "_Unit", given: Tensor, out: Tensor) -> None:
        """Add a unit's gradients, one row for each rank, to those of the passes before; `out` gets this rank's part."""
        if self._twice:
            parts = given.view(self._within.size, -1).split(unit.widths, 1)
            self._digests |= {p: tensor_digest(part) for p, part in zip(unit.parameters, parts, strict=True)}
        if self._made != self._doubled:
            transport = self._transport_of(self._made - (self._made > self._doubled >= 0))
            room = transport.room(out.numel(), given)
            room.copy_(given.view(len(room), 1, -1))  # nothing, where this rank has no leaf
            for node, row in transport.finish(transport.start(room)):  # a copy: what has arrived may hold others' rows
                push(unit.nodes, node, row.clone(), self.total, Tensor.add_)
        if self._made + 1 < self._passes:
            out.zero_()
        else:
            out.copy_(self._root(unit))

    def _root(self, unit: "_Unit") -> Tensor:
        """This rank's part of the sum over all micro-batches."""
        nodes, unit.nodes = unit.nodes, []
        if [node for node, _ in nodes] != nodes_of(self._blocks[self.replicas.rank], self.total):
            raise RunError("parallel.shard=full: FSDP2 reduced a unit in some of the passes alone; set shard=optimizer")
        return self._ends.sum([row for _, row in nodes])()

    def _take_shard(self, parameter: Tensor) -> None:
        """FSDP2 calls this in each pass; the gradient is that of the step in the last one, and zeros before."""
        self._guard.take(parameter)
        if self._made + 1 < self._passes:
            parameter.grad = None

    def _give(self) -> None:
        super()._give()
        for parameter in self._cut:
            if parameter.grad is None:
                raise UserError(
                    "parallel.shard=full: FSDP2 has not reduced all units: call the model itself in each sum, or set "
                    "shard=optimizer"
                )
            gradient = cast(DTensor, parameter.grad).to_local().reshape(-1)
            place_gradient(parameter, shard_of(parameter).of(gradient), self._updated)

    def end(self) -> None:
        """As `Accumulation.end`."""
        super().end()
        self._allow()
        for watch in self._watches:
            watch.remove()

    def _summed(self) -> Sequence[Tensor]:
        return [*self._parameters, *self._cut]


class _Room:
    """Room for what is sent and received, as FSDP2 asks for it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor whose values do not matter."""
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass
class _Gather(_Room):
    """The all-gather of a unit's weights, as FSDP2 calls it; a rank that is lost is reported in plain words."""

    world: World
    ring: bool

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> dist.Work | None:
        work = self.world.all_gather(input_tensor, output_tensor, self.ring)
        return work if async_op else self.world.wait(work)


@dataclass
class _Unit(_Room):
    """The reduce-scatter of a unit, as FSDP2 calls it.

    Attributes:
        reduce: does the work.
        parameters: the trainable ones, in FSDP2's order.
        widths: how many elements of each a rank holds, or would if the last rank had as many.
        nodes: of the tree, from left to right, with this rank's part of the passes so far.
    """

    reduce: Callable[["_Unit", Tensor, Tensor], None]
    parameters: list[Tensor]
    widths: list[int]
    nodes: list[tuple[Node, Tensor]] = field(default_factory=list)

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


def _sharding(module: nn.Module, units: Sequence[nn.Module]) -> str:
    """A line on what is sharded, and on what is gathered at a time."""
    names = {held: name for name, held in module.named_modules()}
    cut = sum(parameter.numel() for parameter in module.parameters() if isinstance(parameter, DTensor))
    share = cut / max(1, sum(parameter.numel() for parameter in module.parameters()))
    return (
        f"parallel.shard=full: {share:.1%} of the weights are sharded; gathered one at a time: "
        f"{some([names[unit] for unit in units], 3) if units else 'nothing, the model has no list of modules'}"
    )
