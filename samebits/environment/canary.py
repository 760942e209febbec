"""A digest of results that show how this process computes. It takes some milliseconds.

A variable only asks a library for something; the canary shows whether the library obeyed. Each operation below
gives other bits as soon as one of the portable pins is off, on the CPUs named.
"""

import hashlib
import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from ..record.classes import RELEASED as RELEASED  # what the canary gives where all is as released


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


def _numpy() -> Tensor:
    numbers = _numbers(256, start=12).numpy()
    return torch.from_numpy(numpy.exp(numbers) + numpy.exp(numbers.astype(numpy.float64)))


def _solution() -> Tensor:
    """Of a linear system, by OpenBLAS."""
    matrix = _numbers(64, 64, start=13).double().numpy()
    return torch.from_numpy(numpy.linalg.solve(matrix + 9 * numpy.eye(64), matrix))


def _c_library() -> Tensor:
    """The functions that generators of random numbers call: Python's, NumPy's, and torch's in float64."""
    numbers = (_numbers(4096, start=14) * 3).tolist()  # so many, because few of them tell one CPU from another
    rows = [(math.exp(x), math.sin(x), math.cos(x), math.log(x + 4), math.pow(x + 4, 2.2)) for x in numbers]
    return torch.tensor(rows, dtype=torch.float64)


def _vector_functions() -> Tensor:
    """Those of MKL that gave one result on every CPU. On some of these inputs its less accurate kernels give others.

    Square roots, tangents and inverse trigonometric functions are left out: they differ between CPUs of the class.
    """
    x = _numbers(4096, start=15)
    everywhere = torch.exp, torch.tanh, torch.erf, torch.erfc, torch.sin, torch.cos
    positive = torch.log, torch.log2, torch.log10
    of = [function(9 * each) for each in (x, x.double()) for function in everywhere]
    of += [function(each.abs() + 2**-9) for each in (x, x.double()) for function in positive]
    return torch.stack([*(each.double() for each in of), torch.erfinv(x).double(), torch.erfinv(x.double())])


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "MKL_CBWR": _product,  # every CPU
    "ATEN_CPU_CAPABILITY": _softmax,  # CPUs with AVX-512
    "ONEDNN_MAX_CPU_ISA": _convolution,  # CPUs with AVX-512
    "threads": _layer_norm_gradient,  # every CPU
    "nnpack": _convolution_without_onednn,  # every CPU; torch asks NNPACK only where oneDNN is off
    "NPY_DISABLE_CPU_FEATURES": _numpy,  # CPUs with AVX-512
    "OPENBLAS_CORETYPE": _solution,  # CPUs with AVX-512
    "libm": _c_library,  # CPUs without FMA
    "vector functions": _vector_functions,  # a CPU whose MKL takes other kernels than all that were tried
}


@torch.no_grad()
def arithmetic_canary() -> str:
    """SHA-256 (hex) over the results of `OPERATIONS`; no setting is left changed."""
    hasher = hashlib.sha256()
    for name, operation in OPERATIONS.items():
        hasher.update(name.encode())
        hasher.update(operation().contiguous().numpy().tobytes())
    return hasher.hexdigest()
