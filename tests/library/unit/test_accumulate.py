"""Gradients: the sum of a tree, in the parameters' format; buffers, layouts and odd modules. One process, no ranks."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from states import nonfinite_of, parallel_of, state_of
from torch import Tensor, nn

from samebits.core import accumulate, buckets
from samebits.core.accumulate import Accumulation
from samebits.core.buckets import Bucket
from samebits.core.finite import one_nan
from samebits.core.ranks import World
from samebits.core.shards import gradients_held
from samebits.core.tree import total
from samebits.core.unready import Unready

ALONE = World(0, 1, torch.device("cpu"))
MICRO_BATCHES = 4
SETTINGS = parallel_of(MICRO_BATCHES)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batch(step: int) -> list[Tensor]:
    """The inputs of each micro-batch of a step: (8, 6)."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(8, 6, generator=generator) for _ in range(MICRO_BATCHES)]


def loss_of(model: nn.Module, inputs: Tensor, scale: float = 1.0, **options: bool) -> Tensor:
    return model(inputs, **options).pow(2).mean() * scale


def losses_of(model: nn.Module, step: int = 0) -> list[Callable[[], Tensor]]:
    return [partial(loss_of, model, inputs) for inputs in batch(step)]


def test_gradient_is_laid_out_as_its_parameter():
    """A fused optimizer takes its elements by their place in memory: it would give each one another's gradient."""
    trained = []
    for fused, layout in itertools.product((True, False), (torch.contiguous_format, torch.channels_last)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=layout)
        images = torch.randn(MICRO_BATCHES, 2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
        summed(model, [partial(loss_of, model, inputs) for inputs in images])
        torch.optim.SGD(model.parameters(), lr=1, fused=fused).step()
        assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
        trained.append(model[0].weight.detach().contiguous())
    assert torch.equal(trained[0], trained[2]) and torch.equal(trained[1], trained[3])


def reference(model: nn.Module, losses: list[Callable[[], Tensor]]) -> list[Tensor]:
    """The mean of the micro-batches' own gradients, as a plain script may write it: the leaves, and their tree."""
    own: list[list[Tensor]] = []
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for loss in losses:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        model.zero_grad()
        (loss() / len(losses)).backward()
        own.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    model.zero_grad()
    # what is shorter than float32 is added in it, and rounded once
    longer = [[g.float() if g.itemsize < 4 else g for g in leaves] for leaves in zip(*own, strict=True)]
    return [total(torch.stack(leaves)).to(p.dtype) for leaves, p in zip(longer, model.parameters(), strict=True)]


def add_all(gradients: Any, losses: list[Callable[[], Tensor]], rechecked: int | None = None) -> None:
    """Each micro-batch's own."""
    for micro_batch in gradients.micro_batches(rechecked):
        gradients.add(losses[micro_batch]())


def summed(model: nn.Module, losses: list[Callable[[], Tensor]], rechecked: int | None = None) -> Accumulation:
    """One step of the product, which leaves the mean in `.grad`."""
    gradients = Accumulation(state_of(model), parallel_of(len(losses)), ALONE)
    add_all(gradients, losses, rechecked)
    gradients.reduce()
    gradients.end()
    return gradients


def require_reference(model: nn.Module, losses: list[Callable[[], Tensor]]) -> None:
    """Every gradient has the bits of the reference, whichever micro-batch is computed twice."""
    expected = reference(model, losses)
    for rechecked in (None, *range(0, len(losses), 3)):
        summed(model, losses, rechecked)
        for (name, parameter), mean in zip(model.named_parameters(), expected, strict=True):
            assert parameter.grad.dtype == parameter.dtype, name
            assert torch.equal(parameter.grad, mean), (name, rechecked)


def test_gradient_is_the_tree_of_the_micro_batches_own():
    model, plain = network(), network()
    gradients = Accumulation(state_of(model), SETTINGS, ALONE)
    for step in range(3):  # more than one: nothing of a step may leak into the next
        losses = losses_of(plain, step)
        expected = reference(plain, losses)
        add_all(gradients, losses_of(model, step))
        mean_loss = gradients.reduce()
        own = torch.stack([loss().detach().double() for loss in losses])
        assert torch.equal(mean_loss, total(own) / MICRO_BATCHES)
        for p, mean in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, mean)
        gradients.discard()


def given(dtype: torch.dtype, micro_batches: int, factor: float = 1.0) -> tuple[nn.Module, list[Callable[[], Tensor]]]:
    """A vector and losses whose gradients are the given numbers, of wide spread: any other order adds otherwise."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(-20, 0, (micro_batches, 999), generator=generator)
    values = torch.ldexp(torch.randn(micro_batches, 999, generator=generator, dtype=torch.float64), sizes) * factor
    model = nn.ParameterList([torch.zeros(999, dtype=dtype)])
    losses = [partial(lambda row: (model[0] * row).sum(), value.to(dtype)) for value in values]
    return model, losses


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 7, 8, 12, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradient_is_added_in_its_parameters_format(dtype: torch.dtype, micro_batches: int):
    """float64 in float64; bfloat16 and float16 in float32, rounded once, at the root."""
    require_reference(*given(dtype, micro_batches))


def test_other_orders_and_formats_would_be_seen():
    for dtype in (torch.float32, torch.bfloat16):
        model, losses = given(dtype, 7)
        (mean,) = reference(model, losses)
        from_the_left = torch.zeros(999, dtype=dtype)
        for loss in losses:
            model.zero_grad()
            (loss() / len(losses)).backward()
            from_the_left += model[0].grad
        assert not torch.equal(from_the_left, mean)


@pytest.mark.parametrize("factor", [1e30, 1e-38])
def test_large_and_subnormal_gradients_are_summed_as_float32_sums_them(factor: float):
    model, losses = given(torch.float32, 7, factor)
    require_reference(model, losses)
    gradient = model[0].grad.abs()
    assert gradient.isfinite().all() and gradient.max() > 0.1 * factor / 7
    if factor < 1:
        assert ((gradient > 0) & (gradient < torch.finfo(torch.float32).tiny)).any()  # subnormals stay


class Conditional(nn.Module):
    """Parameters that are tied, that no micro-batch uses, that one uses alone; of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.sometimes, self.unused, self.tied = (nn.Linear(6, 6) for _ in range(4))
        self.tied.weight = self.layer.weight
        self.scale, self.nothing = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor, extra: bool) -> Tensor:
        hidden = self.tied(self.layer(inputs)) * self.scale + self.nothing.sum()
        return self.sometimes(hidden) if extra else hidden


@pytest.mark.parametrize("bucket", [1 << 22, 40, 1])
@pytest.mark.parametrize("users", [(), (0,), (1,), (2,), (3,), (0, 1), (0, 2, 3)])
def test_what_a_micro_batch_does_not_use_has_zeros_there(
    users: tuple[int, ...], bucket: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(buckets, "BUCKET", bucket)
    model = Conditional()
    require_reference(model, [partial(loss_of, model, batch(0)[n], extra=n in users) for n in range(MICRO_BATCHES)])
    assert not model.unused.weight.grad.any() and model.nothing.grad.shape == (0, 3)
    assert model.sometimes.weight.grad.any() == bool(users)


def accumulates_everywhere(left: tuple[int, int], right: tuple[int, int], leaves: int) -> bool:
    """Two leaves in a row are siblings, whether the left one is odd or even: a planted fault."""
    return left[1] == right[0] and right[1] - left[0] == 2


def test_leaf_that_is_accumulated_into_the_wrong_sibling_is_found(monkeypatch: pytest.MonkeyPatch):
    model, losses = given(torch.float32, 7)
    require_reference(model, losses)
    monkeypatch.setattr(accumulate, "are_siblings", accumulates_everywhere)
    with pytest.raises((AssertionError, ValueError)):
        require_reference(model, losses)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("micro_batch", range(MICRO_BATCHES))
def test_nonfinite_value_in_one_micro_batch_is_named(value: float, micro_batch: int):
    model = network()
    losses = losses_of(model)
    assert nonfinite_of(model, summed(model, losses)) == []
    losses[micro_batch] = partial(losses[micro_batch], value)
    message = [f"{name} (largest finite value 0.0e+00)" for name, _ in model.named_parameters()]
    assert nonfinite_of(model, summed(model, losses)) == message


def test_nonfinite_gradient_is_named_with_its_largest_finite_value():
    model, losses = given(torch.float32, 7)
    (mean,) = reference(model, losses)
    hole = torch.ones(999).index_fill(0, mean.abs().argmax(), torch.nan)
    gradients = summed(model, [*losses[:-1], lambda: (model[0] * hole).sum() + losses[-1]()])
    largest = model[0].grad[model[0].grad.isfinite()].abs().max()
    assert nonfinite_of(model, gradients) == [f"0 (largest finite value {largest:.1e})"]


class WithoutGradient(torch.autograd.Function):
    """The first input, whose gradient it passes on; for the second one it returns None, as compiled code may."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, unused: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("absent", [(0, 1, 2, 3), (0,), (1,), (1, 2), (3,)])
def test_gradient_that_a_function_does_not_return_is_that_of_an_unused_parameter(
    absent: tuple[int, ...], is_checked: bool, monkeypatch: pytest.MonkeyPatch
):
    """Autograd calls the hook for it, too. The planted fault takes each call for a gradient."""
    if not is_checked:
        monkeypatch.setattr(Bucket, "has_gradient", lambda bucket, tensor: True)

    def losses(model: nn.Module, extra: nn.Parameter, is_passed: bool) -> Iterator[Callable[[], Tensor]]:
        for number, inputs in enumerate(batch(0)):
            if number not in absent:
                yield partial(lambda inputs: loss_of(model, inputs) - 0.0 * extra.sum(), inputs)
            elif is_passed:
                yield partial(lambda inputs: WithoutGradient.apply(loss_of(model, inputs), extra), inputs)
            else:
                yield partial(loss_of, model, inputs)

    bits = []
    for is_passed in (True, False):
        model = network()
        model.extra = extra = nn.Parameter(torch.ones(3))  # whose gradients are -0.0, and sums with zeros 0.0
        try:
            summed(model, [*losses(model, extra, is_passed)])
        except AssertionError:
            break
        bits.append(flat(model).view(torch.int32))
    assert (len(bits) == 2 and torch.equal(*bits)) == is_checked


def test_every_nan_is_one():
    model = network()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.view(-1)[:2] = torch.tensor([0x7FC00000, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    grad = model[0].weight.grad
    assert grad.view(-1)[:2].isnan().all() and len(grad.view(torch.int32).unique()) == 3
    one_nan(gradients_held(dict(model.named_parameters())).values())
    assert len(grad.view(torch.int32).unique()) == 2 and grad.isnan().sum() == 2


def test_discard_restores_buffers_and_drops_gradients():
    model = network()
    gradients = Accumulation(state_of(model), SETTINGS, ALONE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    add_all(gradients, losses_of(gradients.module))
    gradients.reduce()
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    gradients.discard()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def flat(model: nn.Module) -> Tensor:
    """Its gradient as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("accumulates", [False, True])
def test_hook_of_the_owners_sees_each_micro_batch_alone(accumulates: bool, monkeypatch: pytest.MonkeyPatch):
    """Where autograd adds siblings by itself, it would see their sum on some world sizes: the planted fault."""
    if accumulates:
        monkeypatch.setattr(Bucket, "look_for_hooks", lambda bucket: setattr(bucket, "accumulates", True))

    def clip(parameter: Tensor) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    gradients_of_each = []
    for rechecked in (None, 1):  # whose neighbours autograd never adds
        model = network()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
        summed(model, losses_of(model), rechecked)
        gradients_of_each.append(flat(model))
    assert torch.equal(*gradients_of_each) != accumulates


@pytest.mark.parametrize("waits_in_grad", [False, True])
def test_loop_that_drops_gradients_drops_none_of_a_sibling(waits_in_grad: bool, monkeypatch: pytest.MonkeyPatch):
    """As the body of a loop does that was that of a step. The planted fault leaves the left sibling's in `.grad`."""
    if waits_in_grad:
        lend = Bucket.lend
        monkeypatch.setattr(Bucket, "lend", lambda bucket: None)
        monkeypatch.setattr(Unready, "put", lambda unready: None)
        add = Accumulation._add

        def keeps(self: Accumulation, bucket: Bucket) -> None:
            add(self, bucket)
            lend(bucket)

        monkeypatch.setattr(Accumulation, "_add", keeps)

    def loss(model: nn.Module, inputs: Tensor, drops: bool) -> Tensor:
        if drops:
            model.zero_grad()
        return loss_of(model, inputs)

    found = []
    for drops in (False, True):
        model = network()
        summed(model, [partial(loss, model, inputs, drops) for inputs in batch(0)])
        found.append(flat(model))
    assert torch.equal(*found) != waits_in_grad
