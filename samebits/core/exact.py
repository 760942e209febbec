"""Functions that every CPU, and any number of ranks, rounds alike, in place of torch's that do not."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor

from .ranks import ALONE, World
from .shards import Scattered, joined
from .tree import total

BLOCK = 256  # squares that are added before all others
ROOM = {"cpu": 1 << 18, "cuda": 1 << 22}  # squares at a time: as a cache holds, or as keeps a GPU busy
MANTISSA, BIAS = 52, 1023  # of float64


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of each element; differentiable.

    On CPU `torch.sqrt` calls a library of vector functions, whose last bit depends on the CPU. Here it is the
    processor's own instruction, which IEEE 754 defines to the last bit. CUDA's square root rounds correctly as well,
    unless it is compiled with `-prec-sqrt=false`, which torch is not.

    Args:
        x: float32 or float64, of any shape.

    Returns:
        The same shape and dtype; NaN where x is negative. The gradient is 1 / (2 sqrt(x)): infinite where x is 0.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"sqrt of {x.dtype} asked for, float32 or float64 wanted")
    root: Tensor = _Sqrt.apply(x)
    return root


class _Sqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = _root(x)
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return gradients[0] / (2 * root)


def _root(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return torch.sqrt(x)
    root = torch.empty_like(x)
    with numpy.errstate(invalid="ignore"):
        numpy.sqrt(x.detach().resolve_neg().numpy(), out=root.numpy())
    return root


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients, in place, so that their norm as one vector is at most `max_norm`.

    It does what torch's function of that name does, but adds the squares in one order, which is that of the elements.
    So the norm depends neither on the world size nor on `parallel.shard` nor on threads.

    Args:
        parameters: those whose `.grad` is to be scaled; where it is None, they are left out.

    Returns:
        The norm before, a scalar of float64 on the gradients' device; infinite where one of them is not finite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norm = _norm(gradients)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {gradient.dtype for gradient in gradients}:
        alike = [_here(gradient) for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(alike, scale.to(dtype))
    return norm


def _here(gradient: Tensor) -> Tensor:
    return gradient.shard.local if isinstance(gradient, Scattered) else gradient


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """The square root of the sum of all squares, added in float64 in one order, whichever rank holds what.

    The gradients, in logical order, are one vector, which is cut into blocks of `BLOCK` elements; zeros fill the last
    one up. In a block the second half of the squares is added to the first, of the sums again the second half to the
    first, until one is left. Of the blocks' sums neighbours are added, level by level; an odd last one passes up.

    A rank sends the sums of its blocks, and its squares of blocks that lie on several ranks. Where it has none it sends
    zeros, so that adding all as integers rounds nothing: it joins their bits.
    """
    world = next((gradient.shard.world for gradient in gradients if isinstance(gradient, Scattered)), ALONE)
    borders, held, size = _layout(gradients, world.rank)
    count = -(-size // BLOCK)
    shared = {block: row for row, block in enumerate(dict.fromkeys(at // BLOCK for at in borders if at % BLOCK))}
    sizes = [len(shared) * BLOCK, max(1, count)]
    sent = torch.zeros(sum(sizes), dtype=torch.float64, device=gradients[0].device)
    squares, sums = sent.split(sizes)
    rows = squares.view(-1, BLOCK)
    for start, part in held:
        for block in {start // BLOCK, (start + len(part) - 1) // BLOCK} & shared.keys():
            first = block * BLOCK - start  # the block's first element, as a place in the part
            inside = part[max(first, 0) : first + BLOCK]
            rows[shared[block], max(-first, 0) :][: len(inside)] = inside
    exponent = _exponent(gradients, held, world)
    _square(squares, exponent)
    _add_blocks(held, exponent, sums)
    world.sum(sent.view(torch.int64))
    if shared:
        sums[torch.tensor(list(shared)).to(sums.device, non_blocking=True)] = _folded(_halves(squares))
    norm = _root(total(sums))
    if exponent is not None:
        norm = norm * _power(exponent)
    return norm.where(norm.isfinite(), torch.inf)


def _layout(gradients: Sequence[Tensor], mine: int) -> tuple[list[int], list[tuple[int, Tensor]], int]:
    """Where in the vector of all gradients another rank's part begins, this rank's parts with their places, its length.

    What every rank holds counts as the first one's.
    """
    borders, held, size, last = [], [], 0, 0
    for gradient in gradients:
        shard = gradient.shard if isinstance(gradient, Scattered) else None
        for rank, (start, stop) in enumerate(pairwise(shard.edges if shard else (0, gradient.numel()))):
            if start == stop:
                continue
            if rank != last:
                borders.append(size + start)
            if rank == mine:
                held.append((size + start, (shard.local if shard else gradient).reshape(-1)))
            last = rank
        size += gradient.numel()
    return borders, held, size


def _exponent(gradients: Sequence[Tensor], held: Sequence[tuple[int, Tensor]], world: World) -> Tensor | None:
    """The largest element's exponent, taken away before squaring; None where float64 holds all squares as they are."""
    if all(gradient.dtype != torch.float64 for gradient in gradients):
        return None
    edges = [edge.double().abs() for _, part in held for edge in part.aminmax()]
    none = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    largest = torch.stack([none, *edges]).amax()
    largest = largest.where(largest.isfinite(), torch.inf)
    world.largest(largest)
    return ((largest.view(torch.int64) >> MANTISSA) - BIAS).clamp(1 - BIAS, BIAS - 1)


def _power(exponent: Tensor) -> Tensor:
    """2**exponent for whole numbers, exactly: pow() may be off by a last bit."""
    return (exponent + BIAS << MANTISSA).view(torch.float64)


def _square(values: Tensor, exponent: Tensor | None) -> None:
    if exponent is not None:
        values.mul_(_power(-exponent))
    values.mul_(values)


def _add_blocks(held: Sequence[tuple[int, Tensor]], exponent: Tensor | None, out: Tensor) -> None:
    """Write the sums of the blocks of which this rank holds a part; they are final where it holds all of a block."""
    zeros = torch.zeros(BLOCK, device=out.device)
    runs: list[list[int]] = []  # of blocks, begun and ended by zeros
    parts, end = [], 0
    for start, part in held:
        if start != end or not runs:
            parts += [zeros[: -end % BLOCK], zeros[: start % BLOCK]]
            runs.append([start // BLOCK, 0])
        parts.append(part)
        end = start + len(part)
        runs[-1][1] = -(-end // BLOCK)
    if not held:
        return
    parts.append(zeros[: -end % BLOCK])
    # room that is made once: were each part to make its own, a CPU's heap would grow by holes between them
    room = out.new_empty(min(sum(stop - start for start, stop in runs) * BLOCK, ROOM[out.device.type]))
    halves, sums = _halves(room), [out.new_empty(0)]
    for values in joined(parts, len(room)):
        _square(room[: len(values)].copy_(values), exponent)
        sums.append(_folded(halves)[: len(values) // BLOCK].clone())
    lengths = [stop - start for start, stop in runs]
    for (start, stop), own in zip(runs, torch.cat(sums).split(lengths), strict=True):
        out[start:stop] = own


def _halves(squares: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each block the first half and the second, of the first again the halves, and so on."""
    rest, halves = squares.view(-1, BLOCK), []
    while rest.shape[1] > 1:
        left, right = rest.chunk(2, 1)
        halves.append((left, right))
        rest = left
    return halves


def _folded(halves: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The sums of the blocks: each second half is added to its first one, in place."""
    for left, right in halves:
        left += right
    return halves[-1][0][:, 0]
