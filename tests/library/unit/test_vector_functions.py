"""MKL's vector functions: the canary sees whether they compute otherwise; threads meet none for the first time."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.config.settings import Determinism
from samebits.core import flags, libraries
from samebits.environment import canary


@pytest.mark.parametrize("threads", [1, 2])
def test_vector_functions_are_called_once_where_there_are_threads(threads: int):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and isinstance(args[0], Tensor):
                names.append(f"{function.name().removeprefix('aten::')} {args[0].dtype}")
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    torch.set_num_threads(threads)
    try:
        with Seen():
            flags.apply(Determinism(cpu="native", relax=()))
    finally:
        torch.set_num_threads(1)
    wanted = {f"{name} {kind}" for name in libraries.VECTOR_FUNCTIONS for kind in (torch.float32, torch.float64)}
    assert wanted & {*names} == (wanted if threads > 1 else set())


PROBED = [name for name in libraries.VECTOR_FUNCTIONS if name not in ("sqrt", "acos", "asin", "atan", "tan", "trunc")]


@pytest.mark.parametrize("name", PROBED)
def test_canary_sees_a_vector_function_that_computes_otherwise(name: str, monkeypatch: pytest.MonkeyPatch):
    """One value of 4096 is off by its last bit."""
    computed = getattr(torch, name)

    def otherwise(x: Tensor) -> Tensor:
        y = computed(x)
        y[7] = y[7].nextafter(torch.tensor(torch.inf, dtype=y.dtype)) if y.dtype is torch.float32 else y[7]
        return y

    before = canary.arithmetic_canary()
    monkeypatch.setattr(torch, name, otherwise)
    assert canary.arithmetic_canary() != before
