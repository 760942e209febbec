"""Buffers: the mean of what micro-batches changed, added in a tree of float64, or refused where none is."""

from collections.abc import Callable

import pytest
import torch
from states import nonfinite_of, parallel_of, state_of
from torch import Tensor, nn

from samebits.core.accumulate import Accumulation
from samebits.core.buffers import Buffers
from samebits.core.errors import UserError
from samebits.core.ranks import World
from samebits.core.transport import Transport
from samebits.core.tree import Node, blocks, push, total

ALONE = World(0, 1, torch.device("cpu"))
MICRO_BATCHES = 4

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


def step(module: nn.Module, micro_batches: int = MICRO_BATCHES, times: int = 1) -> Accumulation:
    """So many steps of `module`, whose inputs are the micro-batches' numbers."""
    gradients = Accumulation(state_of(module), parallel_of(micro_batches), ALONE)
    for _ in range(times):
        for micro_batch in gradients.micro_batches():
            gradients.add(module(micro_batch))
        gradients.reduce()
    return gradients


def written(values: list[Tensor]) -> Change:
    """Each micro-batch writes a value of its own into the buffer."""
    return lambda module, micro_batch: module.held.copy_(values[micro_batch])


# ---- floating-point


def wide(count: int, size: int = 4096) -> list[Tensor]:
    """Numbers over all binary orders of magnitude of float32 down to 2**-60, of both signs."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-60, 125, (count, size), generator=generator)
    return list(torch.ldexp(torch.randn(count, size, generator=generator, dtype=torch.float64), exponents).float())


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7, 8, 64])
def test_mean_is_the_tree_of_the_changes_in_float64(micro_batches: int):
    values, start = wide(micro_batches), wide(1)[0].flip(0)
    module = Holder(start, written(values))
    step(module, micro_batches)
    changes = torch.stack([value.double() - start.double() for value in values])
    assert torch.equal(module.held, (start.double() + total(changes) / micro_batches).float())


def nodes_of_rank(block: range, values: list[Tensor], start: Tensor) -> list[tuple[Node, Tensor]]:
    """What a rank with these micro-batches has to send."""
    module = Holder(start, written(values))
    buffers = Buffers(module, len(values), ALONE, Transport([], [], len(values)))
    buffers.begin()
    for micro_batch in block:
        buffers.restore()
        module(micro_batch)
        buffers.add(micro_batch)
    return buffers._nodes


@pytest.mark.parametrize("micro_batches", [4, 7])
def test_partition_over_ranks_changes_no_bit(micro_batches: int):
    values, start = wide(micro_batches), wide(1)[0].flip(0)
    sums = []
    for ranks in range(1, micro_batches + 1):
        joined: list[tuple[Node, Tensor]] = []
        for block in blocks(micro_batches, ranks):
            for node, change in nodes_of_rank(block, values, start):
                push(joined, node, change, micro_batches, Tensor.add_)
        ((_, root),) = joined
        sums.append(root)
    assert all(torch.equal(sums[0], other) for other in sums)
    changes = [value.double() - start.double() for value in values]
    assert not torch.equal(sums[0], sum(changes[1:], changes[0]))  # a tree is needed: float64 alone would tell orders


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
    before = {name: buffer.double() for name, buffer in module.norm.named_buffers()}
    gradients = step(module)
    for norm, inputs in zip(alone, pixels, strict=True):
        norm(inputs)
    for name in ("running_mean", "running_var"):
        mean = (
            before[name]
            + total(torch.stack([getattr(norm, name).double() - before[name] for norm in alone])) / MICRO_BATCHES
        )
        assert torch.equal(getattr(module.norm, name), mean.float())
    assert module.norm.running_var.min() > 1e6
    assert module.norm.num_batches_tracked == 1
    assert nonfinite_of(module, gradients) == []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_statistic_that_becomes_infinite_is_named(value: float):
    def double(module: Holder, micro_batch: int) -> None:
        module.held[1] = value if micro_batch == 2 else 0.0
        module.held[1] *= 2

    module = Holder(torch.zeros(3), double)
    assert nonfinite_of(module, step(module)) == ["buffer held"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_keep_theirs(dtype: torch.dtype):
    values = [torch.full((2,), micro_batch + 1, dtype=dtype) for micro_batch in range(MICRO_BATCHES)]
    module = Holder(torch.zeros(2, dtype=dtype), written(values))
    step(module)
    assert torch.equal(module.held, torch.full((2,), 2.5, dtype=dtype))


MASK = torch.tensor([0.0, float("-inf"), float("inf"), float("nan"), -0.0, 1e-40, 3e38])


@pytest.mark.parametrize("constant", [MASK, torch.arange(6), torch.tensor([True, False])], ids=str)
def test_constants_keep_every_bit(constant: Tensor):
    module = Holder(constant, lambda module, micro_batch: None)
    assert nonfinite_of(module, step(module, times=2)) == []
    assert torch.equal(module.held.view(torch.uint8), constant.view(torch.uint8))


def test_buffer_that_is_put_in_place_anew_is_the_modules_own():
    """`self.held = self.held + 1` makes another tensor: no micro-batch may begin with another's."""

    def replace(module: Holder, micro_batch: int) -> None:
        module.held = module.held + micro_batch

    module = Holder(torch.zeros(2), replace)
    step(module, times=2)
    assert torch.equal(module.held, torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda module, micro_batch: setattr(module, "held", torch.zeros(3)), r"\(3,\), torch.float32"),
        (lambda module, micro_batch: delattr(module, "held"), "no buffer"),
    ],
    ids=["grows", "is forgotten"],
)
def test_buffer_of_another_shape_or_none_is_refused(change: Callable[[Holder, int], None], seen: str):
    with pytest.raises(UserError, match=rf"^buffer held: \(2,\), torch.float32 before a micro-batch, {seen} after it"):
        step(Holder(torch.zeros(2), change))


# ---- integers and booleans


@pytest.mark.parametrize("rise", [1, 600, 2**40 + 1, -(2**40)])
def test_counter_rises_as_in_each_micro_batch_or_by_a_mean_that_is_whole(rise: int):
    module = Holder(torch.tensor([7, 0]), lambda module, micro_batch: module.held.add_(rise))
    step(module, times=2)
    assert module.held.tolist() == [7 + 2 * rise, 2 * rise]
    module = Holder(torch.tensor([10]), lambda module, micro_batch: module.held.sub_(2 * micro_batch))
    step(module)
    assert module.held.tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_that_have_no_whole_mean_are_refused(dtype: torch.dtype):
    start, last = torch.zeros(2, dtype=dtype), torch.tensor([0, 1]).to(dtype)
    module = Holder(start, lambda module, micro_batch: module.held.copy_(last if micro_batch == 3 else start))
    gradients = step(module)
    with pytest.raises(UserError, match=r"^buffer held: .* changed it by amounts whose mean is not whole"):
        nonfinite_of(module, gradients)


def test_flag_that_every_micro_batch_sets_is_set():
    module = Holder(torch.tensor([False, True]), lambda module, micro_batch: module.held.fill_(True))
    assert nonfinite_of(module, step(module)) == []
    assert module.held.tolist() == [True, True] and module.held.dtype == torch.bool
