"""Functions that every CPU, and any number of ranks, rounds alike, in place of torch's that do not."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from .shards import Scattered, joined

CHUNK = 1 << 15  # squares that float64 adds exactly
ROWS = {"cpu": 1, "cuda": 1 << 7}  # of so many squares, looked at together: as a cache holds, or as keeps a GPU busy
MANTISSA, BIAS = 52, 1023  # of float64
LIMB = 36  # bits; CHUNK of them are below 2**53, and two more bits are for numbers that end float64's range


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

    As torch's function of that name, but the norm is the same however the gradients are cut and ordered: the squares
    are added as whole numbers. So it depends neither on the world size nor on `parallel.shard`.

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
    for gradient in map(_here, gradients):
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def _here(gradient: Tensor) -> Tensor:
    return gradient.shard.local if isinstance(gradient, Scattered) else gradient


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """The square root of the sum of all squares.

    The squares, which float64 holds exactly for float32, are cut into two limbs of whole multiples of powers of two
    below the largest one. int64 adds them without rounding, so the order does not matter.
    """
    world = next((gradient.shard.world for gradient in gradients if isinstance(gradient, Scattered)), None)
    adds = world is None or world.leads  # what every rank holds, one of them adds
    mine = [_here(gradient).reshape(-1) for gradient in gradients if adds or isinstance(gradient, Scattered)]
    edges = [edge.double().abs() for part in mine if part.numel() for edge in part.aminmax()]
    none = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    largest = torch.stack([none, *edges]).amax()
    largest = largest.where(largest.isfinite(), torch.inf)
    if world:
        world.largest(largest)
    exponent = (largest.view(torch.int64) >> MANTISSA).clamp(LIMB, 2 * BIAS - 2) - BIAS + 1  # 2**exponent is above it
    room = min(LIMB, 56 - sum(gradient.numel() for gradient in gradients).bit_length()) & ~1  # bits of a square's limb
    scale = _power(room // 2 - exponent)
    # room that is made once: were each part to make its own, a CPU's heap would grow by holes between them
    square, high = none.new_empty(2, ROWS[none.device.type], CHUNK)
    parts = list(joined(mine, square.numel()))
    sums = none.new_zeros(len(parts), 2, len(square))
    for part, (highs, lows) in zip(parts, sums, strict=True):
        square.view(-1)[: part.numel()].copy_(part).mul_(scale)
        square.view(-1)[part.numel() :].zero_()
        square.mul_(square)
        torch.sum(torch.round(square, out=high), 1, out=highs)  # exact: whole numbers below 2**53
        torch.sum(square.sub_(high).mul_(2.0**room).round_(), 1, out=lows)
    limbs = sums.to(torch.int64).sum((0, 2))
    if world:
        world.sum(limbs)
    total = limbs[0].double() * 2.0**-room + limbs[1].double() * 2.0 ** (-2 * room)
    return (sqrt(total) * _power(exponent)).where(largest.isfinite(), torch.inf)


def _power(exponent: Tensor) -> Tensor:
    """2**exponent for whole numbers, exactly: pow() may be off by a last bit."""
    return (exponent + BIAS << MANTISSA).view(torch.float64)
