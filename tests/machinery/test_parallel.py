"""Gradients: exact sums, whatever the order; ranges, buffers and odd modules. One process, no ranks."""

import itertools
import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from project.repro.errors import Refused
from project.repro.training import parallel
from project.repro.training.finite import nonfinite, one_nan
from project.repro.training.parallel import OrderFree
from project.repro.training.summing import gradients_of
from project.repro.training.world import World
from states import parallel_of
from torch import Tensor, nn

ALONE = World(0, 1, torch.device("cpu"))
MICRO_BATCHES = 4
SETTINGS = parallel_of(MICRO_BATCHES)
UNIT = 2.0**-44


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batch(step: int) -> list[Tensor]:
    """The inputs of each micro-batch of a step: (8, 6)."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(8, 6, generator=generator) for _ in range(MICRO_BATCHES)]


def loss_of(model: nn.Module, inputs: Tensor, scale: float = 1.0, **options: bool) -> Tensor:
    return model(inputs, **options).pow(2).mean() * scale


def test_gradient_is_laid_out_as_its_parameter():
    """A fused optimizer takes its elements by their place in memory: it would give each one another's gradient."""
    trained = []
    for fused, layout in itertools.product((True, False), (torch.contiguous_format, torch.channels_last)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=layout)
        gradients, optimizer = OrderFree(model, SETTINGS, ALONE), torch.optim.SGD(model.parameters(), lr=1, fused=fused)
        for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
            images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(micro_batch))
            gradients.add(partial(loss_of, model, images))
        gradients.reduce()
        optimizer.step()
        assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
        trained.append(model[0].weight.detach().contiguous())
    assert torch.equal(trained[0], trained[2]) and torch.equal(trained[1], trained[3])


def sums_of(model: nn.Module, order: list[int], scale: float = 1.0) -> Tensor:
    """The float64 sums themselves after running the micro-batches in `order`, as one rank would."""
    gradients = OrderFree(model, SETTINGS, ALONE)
    inputs = batch(0)
    for micro_batch in gradients.micro_batches(order):
        gradients.add(partial(loss_of, model, inputs[micro_batch], scale))
    return torch.cat(gradients._sums)


def test_gradient_is_the_exact_mean_of_the_rounded_micro_batches():
    model, reference = network(), network()
    gradients = OrderFree(model, SETTINGS, ALONE)
    for step in range(3):  # more than one: nothing of a step may leak into the next
        before = [b.clone() for b in reference.buffers()]
        expected = [torch.zeros(p.shape, dtype=torch.float64) for p in reference.parameters()]
        losses = []
        for inputs in batch(step):
            for buffer, old in zip(reference.buffers(), before, strict=True):
                buffer.copy_(old)
            reference.zero_grad()
            loss = reference(inputs).pow(2).mean()
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.double())
            for total, p in zip(expected, reference.parameters(), strict=True):
                total += (p.grad.double() / UNIT).round() * UNIT
        for buffer, old in zip(reference.buffers(), before, strict=True):
            buffer.copy_(old)

        for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
            gradients.add(partial(loss_of, model, batch(step)[micro_batch]))
        mean_loss = gradients.reduce()

        assert torch.equal(mean_loss, torch.stack(losses).mean())
        for p, total in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, total.float())
        gradients.discard()  # the reference has no mean of buffers, so keep both at the start


def test_order_of_micro_batches_does_not_change_the_sums():
    sums = [sums_of(network(), list(order)) for order in itertools.permutations(range(MICRO_BATCHES))]
    assert all(torch.equal(sums[0], other) for other in sums)


def test_partition_over_ranks_does_not_change_the_sums():
    whole = sums_of(network(), [0, 1, 2, 3])
    for parts in ([[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3], [2], [1], [0]], [[0, 2], [1], [3]]):
        assert torch.equal(whole, sum(sums_of(network(), part) for part in parts))


def spread_values() -> list[Tensor]:
    """Values over 40 binary orders of magnitude: what a sum that rounds cannot add in any order alike."""
    generator = torch.Generator().manual_seed(7)
    size = torch.randint(-40, 0, (16, 4096), generator=generator)
    return list(torch.ldexp(torch.randn(16, 4096, generator=generator), size))


def differing_orders(values: list[Tensor]) -> int:
    """How many elements some order of addition changes."""
    shuffler, totals = random.Random(0), []
    for _ in range(20):
        order = shuffler.sample(values, len(values))
        totals.append(sum(order[1:], order[0]).clone())
    return int(torch.stack([total != totals[0] for total in totals]).any(0).sum())


def test_order_of_micro_batches_does_not_change_sums_of_wide_spread():
    values = spread_values()
    settings = parallel_of(16)
    shuffler, sums = random.Random(0), []
    for _ in range(10):
        weight = nn.ParameterList([torch.zeros(4096)])
        gradients = OrderFree(weight, settings, ALONE)
        for micro_batch in gradients.micro_batches(shuffler.sample(range(16), 16)):
            gradients.add(lambda micro_batch=micro_batch, weight=weight: (weight[0] * values[micro_batch]).sum())
        sums.append(torch.cat(gradients._sums))
    assert all(torch.equal(sums[0], other) for other in sums)


def test_rounding_first_makes_float64_sums_exact_and_nothing_else_does():
    values = spread_values()
    rounded = [(value.double() / UNIT).round() for value in values]
    assert differing_orders(rounded) == 0
    assert differing_orders([value.double() for value in values]) > 0  # float64 alone
    assert differing_orders(values) > 0  # float32


def one_gradient(value: float, micro_batches: int = MICRO_BATCHES, lsb: int = -44) -> tuple[Tensor, list[str]]:
    """The reduced gradient of a parameter whose every micro-batch contributes `value`."""
    model = nn.Linear(1, 1, bias=False)
    settings = parallel_of(micro_batches, lsb=lsb)
    gradients = OrderFree(model, settings, ALONE)
    for _ in gradients.micro_batches(range(micro_batches)):
        gradients.add(lambda: model(torch.full((1, 1), value * micro_batches)).sum())
    gradients.reduce()
    return model.weight.grad, nonfinite(model, gradients.buffers)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 5, 8, 64])
@pytest.mark.parametrize("lsb", [-30, -44, -62, -100, -149])
def test_largest_value_adds_exactly_and_the_next_is_reported(micro_batches: int, lsb: int):
    settings = parallel_of(micro_batches, lsb=lsb)
    limit = torch.tensor(2.0 ** (settings.limit_exponent + lsb))
    below = torch.nextafter(limit, torch.tensor(0.0)).item()
    gradient, names = one_gradient(below, micro_batches, lsb)
    if micro_batches & (micro_batches - 1) == 0:  # else below * micro_batches is rounded before it gets here
        assert gradient.item() == below * micro_batches
    assert names == []
    gradient, names = one_gradient(limit.item(), micro_batches, lsb)
    assert gradient.isinf().all() and names == ["weight"]


def test_float64_parameters_keep_their_precision():
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    gradients = OrderFree(model, SETTINGS, ALONE)
    value = 1 + 2.0**-40  # not a float32
    for _ in gradients.micro_batches(range(MICRO_BATCHES)):
        gradients.add(lambda: model(torch.full((1, 1), value, dtype=torch.float64)).sum())
    gradients.reduce()
    assert model.weight.grad.item() == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("micro_batch", range(MICRO_BATCHES))
def test_nonfinite_value_in_one_micro_batch_is_named(value: float, micro_batch: int):
    model = network()
    gradients = OrderFree(model, SETTINGS, ALONE)
    for current in gradients.micro_batches(range(MICRO_BATCHES)):
        scale = value if current == micro_batch else 1.0
        gradients.add(partial(loss_of, model, batch(0)[current], scale))
    gradients.reduce()
    assert nonfinite(model, gradients.buffers) == [name for name, _ in model.named_parameters()]


def test_every_nan_is_one():
    model = network()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.view(-1)[:2] = torch.tensor([0x7FC00000, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    grad = model[0].weight.grad
    assert grad.view(-1)[:2].isnan().all() and len(grad.view(torch.int32).unique()) == 3
    one_nan(model)
    assert len(grad.view(torch.int32).unique()) == 2 and grad.isnan().sum() == 2


def test_finite_gradients_are_not_named():
    model = network()
    gradients = OrderFree(model, SETTINGS, ALONE)
    for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
        gradients.add(partial(loss_of, model, batch(0)[micro_batch]))
    gradients.reduce()
    assert nonfinite(model, gradients.buffers) == []


def test_running_statistics_move_by_the_mean_of_the_micro_batches_changes():
    model = network()
    start = model[1].running_mean.clone()
    changes = []
    for inputs in batch(0):
        alone = network()
        alone(inputs)
        changes.append(((alone[1].running_mean - start).double() / MICRO_BATCHES / UNIT).round() * UNIT)
    gradients = OrderFree(model, SETTINGS, ALONE)
    for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
        gradients.add(partial(loss_of, model, batch(0)[micro_batch]))
    gradients.reduce()
    assert torch.equal(model[1].running_mean, start + sum(changes).float())
    assert model[1].num_batches_tracked == 1


class Odd(nn.Module):
    """Buffers that are no statistics, and parameters that are tied, unused, or used in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.unused, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("inf"), float("nan"), -0.0, 1.0]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("positions", torch.arange(6))

    def forward(self, inputs: Tensor, extra: bool) -> Tensor:
        hidden = self.tied(self.first(inputs))
        return self.sometimes(hidden) if extra else hidden


def odd_step(order: list[int], bucket: int, monkeypatch: pytest.MonkeyPatch) -> Odd:
    monkeypatch.setattr(parallel, "BUCKET", bucket)
    model = Odd()
    gradients = OrderFree(model, SETTINGS, ALONE)
    for _ in range(2):
        for micro_batch in gradients.micro_batches(order):
            gradients.add(partial(loss_of, model, batch(0)[micro_batch], extra=micro_batch == 2))
        gradients.reduce()
    return model


def bits(tensor: Tensor) -> Tensor:
    """The bit pattern, so that NaN equals itself and -0.0 is not 0.0."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def test_odd_modules_give_the_same_bits_in_any_order_and_any_buckets(monkeypatch: pytest.MonkeyPatch):
    one = odd_step([0, 1, 2, 3], 1 << 22, monkeypatch)
    for order, bucket in (([3, 2, 1, 0], 1 << 22), ([2, 3, 0, 1], 1), ([0, 1, 2, 3], 40)):
        other = odd_step(order, bucket, monkeypatch)
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
    assert torch.equal(one.unused.weight.grad, torch.zeros(6, 6))
    assert one.sometimes.weight.grad.any()
    for (name, buffer), fresh in zip(one.named_buffers(), Odd().buffers(), strict=True):
        assert torch.equal(bits(buffer), bits(fresh)) or name == "mask"
    finite = ~one.mask.isnan()
    assert torch.equal(bits(one.mask[finite]), bits(Odd().mask[finite]))


def test_two_backward_passes_for_one_micro_batch_are_refused():
    model = network()
    gradients = OrderFree(model, SETTINGS, ALONE)

    def twice(inputs: Tensor) -> Tensor:
        (loss_of(model, inputs) / MICRO_BATCHES).backward()
        return loss_of(model, inputs)

    with pytest.raises(Refused, match=r"^a backward\(\) of your own reached the model"):
        for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
            gradients.add(partial(twice, batch(0)[micro_batch]))


def test_gradient_that_comes_after_its_sum_was_sent_is_refused():
    model = network()
    gradients = OrderFree(model, SETTINGS, ALONE)
    for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
        gradients.add(partial(loss_of, model, batch(0)[micro_batch]))
    with pytest.raises(Refused, match=r"^a backward\(\) of your own reached the model"):
        loss_of(model, batch(0)[0]).backward()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group, on which DistributedDataParallel insists."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("reduce", ["tree", "ddp"])
def test_discard_restores_buffers_and_drops_gradients(reduce: str):
    model = network()
    gradients = gradients_of(model, SETTINGS.model_copy(update={"reduce": reduce}), ALONE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
        gradients.add(partial(loss_of, gradients.module, batch(0)[micro_batch]))
    gradients.reduce()
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    gradients.discard()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("group_of_one")
def test_stock_gradients_are_the_mean_of_the_micro_batches():
    every = {
        reduce: gradients_of(network(), SETTINGS.model_copy(update={"reduce": reduce}), ALONE)
        for reduce in ("tree", "ddp")
    }
    for step in range(2):
        for gradients in every.values():
            for micro_batch in gradients.micro_batches(range(MICRO_BATCHES)):
                gradients.add(partial(loss_of, gradients.module, batch(step)[micro_batch]))
            gradients.reduce()
        exact, stock = (gradients.module.parameters() for gradients in every.values())
        for one, other in zip(exact, stock, strict=True):
            torch.testing.assert_close(other.grad, one.grad)  # rounded in another order: close, not equal
