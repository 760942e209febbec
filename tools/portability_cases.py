"""The cases of tools/portability.py: computations, forward and backward, that call as many operations as there are."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, product
from typing import Any

import numpy
import torch
from portability_models import FLOATS, SHORT, WHOLE, Case, backward, elements
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

VECTOR_FUNCTIONS = import_module("samebits.core.libraries").VECTOR_FUNCTIONS

Source = Callable[[], Iterable[Case]]


@dataclass(frozen=True)
class Extent:
    """How much is computed."""

    samples: int  # of each operation and kind of number, spread over all that torch has
    points: int  # of hard numbers; a scalar tail is left
    layouts: int
    seconds: int  # of CPU time that the cases of one operator may take: some loop for hours
    models: bool


EXTENTS = {
    "whole": Extent(samples=3, points=16384 + 5, layouts=5, seconds=120, models=True),
    # For an emulator: functions that work element by element, optimizers, distances. Instructions whose result is
    # approximate, and which CPUs define each for itself, stand in such functions.
    "short": Extent(samples=0, points=32768 + 5, layouts=1, seconds=900, models=False),
}


def hard(kind: torch.dtype, start: int, points: int) -> Tensor:
    """So many numbers: all exponents with subnormals, near 0, near 1, large arguments, of both signs."""
    generator = numpy.random.default_rng(start)
    width = numpy.uint32 if kind is torch.float32 else numpy.uint64
    bits = generator.integers(0, numpy.iinfo(width).max, points // 4, dtype=width, endpoint=True)
    anywhere = bits.view(numpy.float32 if kind is torch.float32 else numpy.float64).copy()
    anywhere[~numpy.isfinite(anywhere)] = 0
    rest = points - len(anywhere)
    spread = generator.random(rest) * 2 - 1  # whole multiples of 2**-53: no function of the C library
    spread[: rest // 4] *= 100
    spread[rest // 4 : rest // 2] *= 4
    spread[-rest // 8 :] = 1 + spread[-rest // 8 :] / 64
    return torch.cat([torch.from_numpy(anywhere), torch.from_numpy(spread).to(kind)])


def layouts(kind: torch.dtype, start: int, extent: Extent) -> Iterator[Tensor]:
    """Hard numbers, contiguous, strided and transposed, short and long."""
    points = hard(kind, start, extent.points)
    yield points.clone()
    if extent.layouts == 1:
        return
    yield points.repeat_interleave(2)[::2]
    yield points[: 127 * 129].reshape(127, 129).t()
    yield points[4000:4007]
    yield points[-20:].abs()


def of_samples(info: Any, extent: Extent) -> Iterator[Case]:
    kinds = [*FLOATS, torch.int64, torch.bool] if extent.samples else []
    for kind in (kind for kind in kinds if kind in info.supported_dtypes("cpu")):
        differentiable = kind in FLOATS and info.supports_autograd
        try:
            samples = list(info.sample_inputs("cpu", kind, requires_grad=differentiable))
        except Exception:  # some samples need another package
            continue
        step = max(1, math.ceil(len(samples) / extent.samples))
        for sample in samples[::step]:
            yield info.name, partial(_sample, info, sample)


def _sample(info: Any, sample: Any) -> None:
    result = info.op(sample.input, *sample.args, **sample.kwargs)
    backward(result, [sample.input, sample.args, sample.kwargs])


def of_elements(info: Any, extent: Extent) -> Iterator[Case]:
    if any(name in info.name for name in ("polynomial", "zeta")):  # of which an argument is the end of a loop
        return
    binary = isinstance(info, BinaryUfuncInfo)
    if not binary and not isinstance(info, UnaryUfuncInfo) and not info.name.startswith("nn.functional."):
        return
    for kind in (kind for kind in FLOATS if kind in info.supported_dtypes("cpu")):
        for one, other in zip(layouts(kind, 1, extent), layouts(kind, 2, extent), strict=True):
            inputs = [one.requires_grad_(info.supports_autograd)]
            if binary:
                inputs.append(other.requires_grad_(info.supports_autograd))
            yield info.name, partial(elements, info.op, inputs)


def of_powers(extent: Extent, kind: torch.dtype) -> Iterator[Case]:
    for exponent in (0.5, -0.5, 2, 3, -1, -2, 1.5, 0.1, 4):
        for points in layouts(kind, 3, extent):
            yield "pow", partial(elements, lambda x, e=exponent: x**e, [points.requires_grad_()])
            yield "pow", partial(elements, lambda x, e=exponent: torch._foreach_pow([x], e), [points.detach()])


def of_modules(extent: Extent) -> Iterator[Case]:
    for info, kind, training in product(module_db, FLOATS, (True, False)):
        try:
            cases = info.module_inputs_func(info, device="cpu", dtype=kind, requires_grad=True, training=training)
        except Exception:
            continue
        for case in cases[:: max(1, math.ceil(len(cases) / extent.samples))]:
            yield info.name, partial(_module, info.module_cls, case, kind, training)


def _module(make: Callable[..., nn.Module], case: Any, kind: torch.dtype, training: bool) -> None:
    module = make(*case.constructor_input.args, **case.constructor_input.kwargs).to(kind).train(training)
    if case.forward_input is not None:
        result = module(*case.forward_input.args, **case.forward_input.kwargs)
        backward(result, [*module.parameters(), case.forward_input.args])


ENDS = {"exp": (-10, 10), **dict.fromkeys(("log", "log2", "log10", "sqrt"), (0, 8)),
        **dict.fromkeys(("acos", "asin", "erfinv"), (-1, 1))}  # fmt: skip


def of_vector_functions(kind: torch.dtype) -> Iterator[Case]:
    """Four million points each: some differ in one of a million."""
    for name, start in product(VECTOR_FUNCTIONS, range(4)):
        yield name, partial(_vector_function, name, kind, start)


def _vector_function(name: str, kind: torch.dtype, start: int) -> None:
    low, high = ENDS.get(name, (-8, 8))
    points = torch.from_numpy(numpy.random.default_rng(start).random(1 << 20)).to(kind)
    getattr(torch, name)(points * (high - low) + low)


def sources(extent: Extent) -> Iterator[tuple[str, Source]]:
    """What gives cases, by name; that of one operator after that of another."""

    def in_kinds(cases: Callable[[torch.dtype], Iterable[Case]]) -> Source:
        return lambda: chain.from_iterable(map(cases, FLOATS))

    for info in op_db:
        yield info.formatted_name, lambda info=info: chain(of_samples(info, extent), of_elements(info, extent))
    yield "powers", in_kinds(partial(of_powers, extent))
    if extent.models:
        yield "modules", partial(of_modules, extent)
    for name, cases in (WHOLE if extent.models else SHORT).items():
        yield name, in_kinds(cases)
    yield "vector functions", in_kinds(of_vector_functions)
