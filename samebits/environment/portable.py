"""Operations of torch that gave the same bits on every CPU that was tried, while the portable flags were in force.

`portable.txt` lists them, by name and by kind of number. The template's `make portability` measures and writes it. An
operation that is not in it may be the same everywhere as well: nobody knows.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..base.project import LIBRARY
from ..core.batch import tensors_in

COMPILED = "torch.compile"  # its name among the operations whose bits may depend on the CPU
TABLE = LIBRARY / "environment" / "portable.txt"
DIFFERS = "-"  # before a kind of number in which the operation differs between CPUs
INTEGERS, MEASURED = "integers", {torch.float32: "float32", torch.float64: "float64"}
ROOTS = (0.5, -0.5)  # as exponents, they are computed by other functions
# not arithmetic: communication moves bits, and FSDP2 moves weights and gradients
SILENT = ("c10d", "_c10d_functional", "fsdp", "profiler")
POINTS = ("set",)  # gives a tensor another storage, as copy.deepcopy does: no number is computed


def plain(name: str) -> str:
    """An operation's name without its namespace, if that is ATen, its overload, and the mark of work in place."""
    name = name.removeprefix("aten::").partition(".")[0]
    return name if name.endswith("__") else name.removesuffix("_")


def operation(function: Any, arguments: Any, result: Any) -> tuple[str, str]:
    """The name of a call in the table, and the kind of numbers that it computes with.

    A variant that works in place has the kernel of the other one, and its name.
    """
    name = plain(function.name())
    if name.endswith("pow") and len(arguments) > 1 and isinstance(arguments[1], float) and arguments[1] in ROOTS:
        name = f"{name}({arguments[1]})"
    return name, _kind([*tensors_in(arguments)] or [*tensors_in(result)])


def is_exact(name: str, arguments: Any, result: Any) -> bool:
    """Whether a call rounds nothing: it takes and gives integers alone, or computes no number."""
    tensors = (*tensors_in(arguments), *tensors_in(result))
    return name in POINTS or all(_kind([tensor]) == INTEGERS for tensor in tensors)


def _kind(tensors: list[Tensor]) -> str:
    numbers = {
        str(tensor.dtype if tensor.layout is torch.strided else tensor.layout).removeprefix("torch.")
        for tensor in tensors
        if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided
    }
    others = sorted(numbers - {*MEASURED.values()})
    return (others or sorted(numbers, reverse=True) or [INTEGERS])[0]


@cache
def table() -> dict[str, tuple[str, ...]]:
    """The kinds of numbers of each operation that was measured; one in which it differs begins with `DIFFERS`."""
    lines = (line.split() for line in TABLE.read_text().splitlines() if line and not line.startswith("#"))
    return {name: tuple(kinds) for name, *kinds in lines}
