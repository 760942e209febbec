"""A digest of results that show how this process computes in float32. It takes a few milliseconds.

A variable only asks a library for something; the canary shows whether the library obeyed. Each operation below
gives other bits as soon as one of the portable pins is off, on the CPUs named.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# Every x86-64 CPU with AVX2 gives this digest with torch 2.13.0's CPU build, while all portable pins are in force.
RELEASED = "2535051f35f3bb1072b530a2f167bc21da76eb5fb90e767998d92e793b611854"


def _numbers(*shape: int, start: int) -> Tensor:
    """float32 multiples of 2**-15 in (-1, 1), made by integer arithmetic alone."""
    i = torch.arange(start, start + torch.Size(shape).numel())
    return (((i * i * 7919 + i * 104729) * 40503 % 65521 - 32760).float() / 32768).reshape(shape)


def _product() -> Tensor:
    return _numbers(8, 300, start=1) @ _numbers(300, 500, start=2)


def _softmax() -> Tensor:
    return F.softmax(_numbers(32, 50, start=3) * 4, -1)


def _convolution() -> Tensor:
    return F.conv2d(_numbers(2, 16, 8, 8, start=4), _numbers(8, 16, 3, 3, start=5), _numbers(8, start=6), padding=1)


def _layer_norm_gradient() -> Tensor:
    x, weight, gradient = _numbers(32, 64, start=7), _numbers(64, start=8), _numbers(32, 64, start=9)
    _, mean, scale = torch.native_layer_norm(x, (64,), weight, None, 1e-5)
    only_weight = [False, True, False]
    return torch.ops.aten.native_layer_norm_backward(gradient, x, (64,), mean, scale, weight, None, only_weight)[1]


def _convolution_without_onednn() -> Tensor:
    before = bool(torch.backends.mkldnn.enabled)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        return F.conv2d(_numbers(16, 3, 8, 8, start=10), _numbers(8, 3, 3, 3, start=11), padding=1)
    finally:
        torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "MKL_CBWR": _product,  # every CPU
    "ATEN_CPU_CAPABILITY": _softmax,  # CPUs with AVX-512
    "ONEDNN_MAX_CPU_ISA": _convolution,  # CPUs with AVX-512
    "threads": _layer_norm_gradient,  # every CPU
    "nnpack": _convolution_without_onednn,  # every CPU; torch asks NNPACK only where oneDNN is off
}


@torch.no_grad()
def arithmetic_canary() -> str:
    """SHA-256 (hex) over the results of `OPERATIONS`; no setting is left changed."""
    hasher = hashlib.sha256()
    for name, operation in OPERATIONS.items():
        hasher.update(name.encode())
        hasher.update(operation().contiguous().numpy().tobytes())
    return hasher.hexdigest()
