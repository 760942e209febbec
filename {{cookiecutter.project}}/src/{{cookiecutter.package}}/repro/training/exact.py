"""Functions that every CPU rounds alike, in place of torch's that do not."""

from typing import Any

import numpy
import torch
from torch import Tensor


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
