"""Buffers: the mean of what micro-batches changed, exact over all of float32's range, or refused where none is."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import pytest
import torch
from project.repro.errors import Refused
from project.repro.training.buffers import Buffers
from project.repro.training.finite import nonfinite
from project.repro.training.parallel import OrderFree
from project.repro.training.world import World
from states import parallel_of
from torch import Tensor, nn

ALONE = World(0, 1, torch.device("cpu"))
MICRO_BATCHES = 4
SETTINGS = parallel_of(MICRO_BATCHES)

Change = Callable[["Holder", int], None]


class Holder(nn.Module):
    """A weight, and one buffer that `change` changes in every forward pass."""

    def __init__(self, value: Tensor, change: Change) -> None:
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.ones(1)), change
        self.register_buffer("held", value.clone())

    def forward(self, micro_batch: int) -> Tensor:
        self.change(self, micro_batch)
        return self.weight.sum()


def step(module: nn.Module, order: Sequence[int] = range(MICRO_BATCHES), times: int = 1) -> OrderFree:
    """So many steps of `module`, whose inputs are the micro-batches' numbers."""
    gradients = OrderFree(module, SETTINGS.model_copy(update={"micro_batches": len(order)}), ALONE)
    for _ in range(times):
        for micro_batch in gradients.micro_batches(order):
            gradients.add(partial(module, micro_batch))
        gradients.reduce()
    return gradients


def written(values: list[Tensor]) -> Change:
    """Each micro-batch writes a value of its own into the buffer."""
    return lambda module, micro_batch: module.held.copy_(values[micro_batch])


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


# ---- floating-point


def wide(count: int, size: int = 4096) -> list[Tensor]:
    """Numbers over all binary orders of magnitude of float32 down to 2**-60, of both signs."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-60, 125, (count, size), generator=generator)
    return list(torch.ldexp(torch.randn(count, size, generator=generator, dtype=torch.float64), exponents).float())


@pytest.mark.parametrize("micro_batches", [2, 3, 8, 64, 1000])
def test_mean_is_exact_over_the_range_of_float32(micro_batches: int):
    """Against sums of fractions, which round nothing."""
    values = wide(micro_batches, size=64)
    module = Holder(torch.zeros(64), written(values))
    step(module, range(micro_batches))
    for column, held in enumerate(module.held):
        exact = sum(Fraction(value[column].item()) for value in values) / micro_batches
        assert held == torch.tensor(float(exact), dtype=torch.float64).float()


def test_order_and_partition_change_no_bit():
    values = wide(MICRO_BATCHES)
    start = wide(1)[0].flip(0)
    means = []
    for order in itertools.permutations(range(MICRO_BATCHES)):
        module = Holder(start, written(values))
        step(module, list(order))
        means.append(module.held)
    assert all(torch.equal(means[0], other) for other in means)

    def limbs(part: list[int]) -> Tensor:
        module = Holder(start, written(values))
        buffers = Buffers(module, MICRO_BATCHES, ALONE)
        buffers.begin()
        for micro_batch in part:
            buffers.restore()
            module(micro_batch)
            buffers.add()
        return buffers._limbs

    whole = limbs([0, 1, 2, 3])
    for parts in ([[0], [1, 2, 3]], [[3, 1], [2, 0]], [[3], [2], [1], [0]]):
        assert torch.equal(whole, sum(limbs(part) for part in parts))
    floats = [
        sum((values[micro_batch].double() for micro_batch in order), torch.zeros(1))
        for order in ((0, 1, 2, 3), (3, 1, 0, 2))
    ]
    assert not torch.equal(*floats)  # limbs are needed: float64 alone would tell these orders apart


def test_statistics_of_large_inputs_are_finite_and_right():
    """Pixels from 0 to 255, which are above what a sum of gradients holds."""
    torch.manual_seed(0)
    pixels = [torch.randint(0, 256, (16, 3)).float() * 1000 for _ in range(MICRO_BATCHES)]

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, micro_batch: int) -> Tensor:
            return self.norm(pixels[micro_batch]).square().mean()

    module, alone = Normed(), [nn.BatchNorm1d(3) for _ in pixels]
    gradients = step(module)
    for norm, inputs in zip(alone, pixels, strict=True):
        norm(inputs)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(norm, name).double() for norm in alone]).mean(0).float()
        assert torch.equal(getattr(module.norm, name), mean)
    assert module.norm.running_var.min() > 1e6
    assert module.norm.num_batches_tracked == 1
    assert nonfinite(module, gradients.buffers) == []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_statistic_that_becomes_infinite_is_named(value: float):
    def double(module: Holder, micro_batch: int) -> None:
        module.held[1] = value if micro_batch == 2 else 0.0
        module.held[1] *= 2

    module = Holder(torch.zeros(3), double)
    assert nonfinite(module, step(module).buffers) == ["buffer held"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_keep_theirs(dtype: torch.dtype):
    values = [torch.full((2,), micro_batch + 1, dtype=dtype) for micro_batch in range(MICRO_BATCHES)]
    module = Holder(torch.zeros(2, dtype=dtype), written(values))
    step(module)
    assert torch.equal(module.held, torch.full((2,), 2.5, dtype=dtype))


def test_constants_keep_every_bit():
    mask = torch.tensor([0.0, float("-inf"), float("inf"), float("nan"), -0.0, 1e-40, 3e38])
    module = Holder(mask, lambda module, micro_batch: None)
    assert nonfinite(module, step(module).buffers) == []
    assert torch.equal(bits(module.held), bits(mask))


def test_buffer_that_is_put_in_place_anew_is_the_modules_own():
    """`self.held = self.held + 1` makes another tensor: no micro-batch may begin with another's."""

    def replace(module: Holder, micro_batch: int) -> None:
        module.held = module.held + micro_batch

    module = Holder(torch.zeros(2), replace)
    step(module, times=2)
    assert torch.equal(module.held, torch.full((2,), 3.0))


def test_buffer_of_another_shape_is_refused():
    def grow(module: Holder, micro_batch: int) -> None:
        module.held = torch.cat([module.held, torch.zeros(1)])

    with pytest.raises(
        Refused, match=r"^buffer held: \(2,\), torch.float32 before a micro-batch, \(3,\), torch.float32 after"
    ):
        step(Holder(torch.zeros(2), grow))


# ---- integers and booleans


@pytest.mark.parametrize("rise", [1, 600, 2**40 + 1, -(2**40)])
def test_counter_rises_as_in_each_micro_batch(rise: int):
    module = Holder(torch.tensor([7, 0]), lambda module, micro_batch: module.held.add_(rise))
    step(module, times=2)
    assert module.held.tolist() == [7 + 2 * rise, 2 * rise]


def test_counter_whose_mean_is_whole_has_the_mean():
    module = Holder(torch.tensor([10]), lambda module, micro_batch: module.held.sub_(2 * micro_batch))
    step(module)
    assert module.held.tolist() == [7]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.tensor([0, 0]), lambda module, micro_batch: module.held[1].add_(micro_batch == 3)),
        (
            torch.tensor([True, True]),
            lambda module, micro_batch: module.held[1].logical_and_(torch.tensor(micro_batch != 3)),
        ),
        (torch.tensor([0, 0], dtype=torch.uint8), lambda module, micro_batch: module.held[1].add_(micro_batch == 3)),
    ],
    ids=["integer", "boolean", "byte"],
)
def test_integers_that_have_no_whole_mean_are_refused(value: Tensor, change: Change):
    module = Holder(value, change)
    gradients = step(module)
    with pytest.raises(Refused, match=r"^buffer held: the micro-batches changed it by amounts whose mean is not whole"):
        nonfinite(module, gradients.buffers)


def test_flag_that_every_micro_batch_sets_is_set():
    module = Holder(torch.tensor([False, True]), lambda module, micro_batch: module.held.fill_(True))
    assert nonfinite(module, step(module).buffers) == []
    assert module.held.tolist() == [True, True] and module.held.dtype == torch.bool
