"""Tensors that are sharded over the ranks: each rank holds an interval of the elements.

Intervals begin at multiples of `ALIGN` bytes. Kernels on CPUs work on so many at a time, and on what is left at the end
one by one, perhaps with other roundings. So an element is in the body of the loop, or in its tail, in the whole tensor
and in the shard alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import UserError
from .ranks import World

ALIGN = 128  # bytes: two vectors of AVX-512


@dataclass(frozen=True)
class Stored:
    """A tensor that lies elsewhere, such as in files, until it is read.

    Attributes:
        read: gives the elements from one place up to another, in logical order: a vector on the CPU.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]


def aligned(dtype: torch.dtype) -> int:
    """So many elements are `ALIGN` bytes."""
    return ALIGN // dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor.

    Attributes:
        local: its elements, a vector; empty where other ranks hold all of them.
        edges: the places in the whole, in logical order, where the ranks' parts begin, by rank; and its end.
        shape: of the whole.
        world: the ranks that hold the other parts.
    """

    local: Tensor
    edges: Sequence[int]
    shape: torch.Size
    world: World

    @property
    def start(self) -> int:
        """The place of the first element in the whole, in logical order."""
        return self.edges[self.world.rank]

    @property
    def stop(self) -> int:
        """The place after the last element."""
        return self.start + self.local.numel()

    def of(self, local: Tensor) -> "Shard":
        """The same part of another tensor of this shape."""
        return replace(self, local=local)

    def cut(self, tensor: Tensor | Stored) -> Tensor:
        """The same part of a whole tensor: a vector."""
        if isinstance(tensor, Stored):
            return tensor.read(self.start, self.stop)
        return tensor.reshape(-1)[self.start : self.stop]


Held = Tensor | Shard  # every rank holds the whole tensor, or a shard


def local(held: Held) -> Tensor:
    """What this rank holds of it."""
    return held.local if isinstance(held, Shard) else held


def moved(held: Held, device: torch.device) -> Held:
    """The same on this device."""
    return held.of(held.local.to(device)) if isinstance(held, Shard) else held.to(device)


def unsharded(held: Held | Stored) -> Tensor:
    """The whole tensor, on every rank; where it is sharded, all have to ask together. Of a `Tensor`, itself."""
    if isinstance(held, Stored):
        return held.read(0, held.shape.numel()).view(held.shape)
    if not isinstance(held, Shard):
        return held
    filled = held.local.new_zeros(held.shape.numel())
    filled[held.start : held.stop] = held.local
    held.world.sum(filled.view(torch.uint8))  # of each byte, all ranks but one have 0: exact, also for -0.0 and NaN
    return filled.view(held.shape)


def weights(model: nn.Module) -> dict[str, Held]:
    """What the model's `state_dict` holds; a name that stands for the same parameter as another has the same object."""
    held: dict[int, Held] = {}
    named = {name: value for name, value in model.state_dict(keep_vars=True).items() if not is_extra(name)}
    for value in named.values():
        held[id(value)] = shard_of(value) if isinstance(value, DTensor) else value.detach()
    return {name: held[id(value)] for name, value in named.items()}


def is_extra(name: str) -> bool:
    """Whether an entry of a module's `state_dict` is what its `get_extra_state` gave."""
    return name.rpartition(".")[2] == "_extra_state"


def extras(model: nn.Module) -> dict[str, Any]:
    """What the modules' `get_extra_state` give, under the names that `state_dict` has for it."""
    return {name: value for name, value in model.state_dict().items() if is_extra(name)}


def shard_of(tensor: DTensor) -> Shard:
    """A tensor that FSDP2 has cut into blocks of rows, as it lies in memory."""
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    rank, size = mesh.get_local_rank(), mesh.size()
    edges = [min(each * -(-rows // size), rows) * (tensor.numel() // rows) for each in range(size + 1)]
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    world = World(rank, size, local.device, mesh.get_group())
    return Shard(local.view(-1), edges, tensor.shape, world)


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor | Stored], extra: Mapping[str, Any]) -> None:
    """As `model.load_state_dict`, of whole tensors and `extra` state, where this rank may hold shards."""

    def part(name: str, tensor: Tensor | Stored) -> Tensor:
        like = held.get(name)
        if not isinstance(like, DTensor) or like.shape != tensor.shape:
            return unsharded(tensor)
        local = shard_of(like).cut(tensor).view(like.to_local().shape).to(like.device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    held = model.state_dict()
    model.load_state_dict({**{name: part(name, tensor) for name, tensor in tensors.items()}, **extra})


class Scattered(Tensor):
    """Stands in `.grad` for a gradient that is sharded. A function that knows nothing of shards is refused.

    Were `.grad` this rank's part or None, such as torch's clip_grad_norm_ would go on with a wrong number.

    Attributes:
        shard: this rank's part of the gradient.
    """

    shard: Shard
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shard: Shard) -> "Scattered":
        made: Scattered = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=shard.local.dtype, device=shard.local.device
        )
        made.shard = shard
        return made

    def __init__(self, shard: Shard) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scattered(shape={tuple(self.shape)}, elements {self.shard.start} to {self.shard.stop} here)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *call: Any) -> Any:
        raise UserError(
            f"{func.overloadpacket.__name__} cannot take a gradient that is sharded over the ranks: to clip "
            f"gradients, or for their norm, call samebits.clip_grad_norm_; for other uses set "
            f"parallel.shard=none"
        )


def of_mixture(error: BaseException | None) -> UserError | None:
    """The refusal that stands for torch's error where a sharded weight is used beside a whole tensor."""
    if not isinstance(error, RuntimeError) or "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    return UserError(
        f"{str(error).split()[0]}: of a weight that is sharded. With parallel.shard=full, call the model as a "
        f"whole and leave its parameters to the optimizer; with parallel.shard=optimizer each rank holds all of them"
    )


def gradients_held(parameters: Mapping[str, Tensor]) -> dict[str, Held]:
    """The gradients of those that have one."""
    held = {name: gradient for name, parameter in parameters.items() if (gradient := parameter.grad) is not None}
    return {name: each.shard if isinstance(each, Scattered) else each for name, each in held.items()}


def joined(vectors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Vectors as one, in parts of `size` elements; the last one may be shorter."""
    parts: list[Tensor] = []
    room = size
    for rest in vectors:
        while rest.numel() >= room:
            yield torch.cat([*parts, rest[:room]]) if parts else rest[:room]
            parts, rest, room = [], rest[room:], size
        if rest.numel():
            parts.append(rest)
            room -= rest.numel()
    if parts:
        yield torch.cat(parts) if len(parts) > 1 else parts[0]
