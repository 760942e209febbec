"""Questions to the libraries in this process: which kernels they use, and how many threads.

A variable only asks a library for something. The answers here are those of the library itself.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

Value = str | int | bool | None


def mkl(function: str, *arguments: int) -> Value:
    """Ask the MKL inside torch; None where torch was built without it."""
    import torch

    answer: int | None = _ask(
        Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", function, ctypes.c_int, *arguments
    )
    return answer


# ATen/cpu/vml.h gives these to MKL's vector functions
VECTOR_FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan", "tanh",
    "trunc",
)  # fmt: skip


def touch_vector_functions() -> None:
    """Call each vector function of MKL once, on one thread.

    Each picks its kernel at its first call. When several threads make that call together, one of them may compute with
    a less accurate kernel (https://github.com/pytorch/pytorch/issues/188792).
    """
    import torch

    for kind in (torch.float32, torch.float64):
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(torch.ones(1, dtype=kind))


def openblas_kernels() -> Value:
    """The CPU whose kernels the OpenBLAS inside NumPy uses; None where NumPy was built without it."""
    name: bytes | None = _ask(_openblas(), "scipy_openblas_get_corename64_", ctypes.c_char_p)
    return name.decode() if name else None


def openblas_threads() -> Value:
    """How many threads that OpenBLAS uses; None where NumPy was built without it."""
    threads: int | None = _ask(_openblas(), "scipy_openblas_get_num_threads64_", ctypes.c_int)
    return threads


@cache
def _openblas() -> Path:
    import numpy

    beside = Path(numpy.__file__).parents[1] / "numpy.libs"
    return next(beside.glob("libscipy_openblas64_*.so"), beside)


def numpy_kernels() -> Value:
    """The instruction sets that NumPy may choose its kernels from, beyond those that it always needs."""
    from numpy import show_config

    return ",".join(show_config(mode="dicts")["SIMD Extensions"].get("found", ()))


def _ask(library: Path, function: str, kind: type, *arguments: int) -> Any:
    """What a function of a library returns; None where there is no such library or function."""
    try:
        requested = getattr(ctypes.CDLL(str(library)), function)
    except (OSError, AttributeError):
        return None
    requested.restype = kind
    return requested(*arguments)
