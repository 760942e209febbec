"""Your model and its loss: they train, follow from the seed, and use no operation whose bits may change."""

from typing import Any

import pytest
import torch
from conftest import micro_batches, ours

from samebits.core import seeds


@pytest.fixture(scope="module")
def batch(config: Any, world: Any) -> Any:
    """The first micro-batch of the first step."""
    return micro_batches(config, world)[0]


def build(config: Any, world: Any) -> torch.nn.Module:
    """A new model, made as in a run."""
    seeds.seed_everything(seeds.derive(config.seed, "init"))
    return ours("model").build(config).to(world.device)


def loss_of(network: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a micro-batch, made as in a run."""
    seeds.seed_everything(0)
    return ours("train").micro_batch_loss(network, batch)


def test_two_models_of_one_seed_have_equal_weights(config: Any, world: Any):
    one, other = (build(config, world).state_dict() for _ in range(2))
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_loss_of_a_micro_batch_is_one_finite_number(config: Any, world: Any, batch: Any):
    loss = loss_of(build(config, world), batch)
    assert loss.shape == () and loss.isfinite()


def test_gradient_step_changes_weights(config: Any, world: Any, batch: Any):
    network = build(config, world)
    before = [p.detach().clone() for p in network.parameters()]
    loss_of(network, batch).backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    assert any(not torch.equal(p, old) for p, old in zip(network.parameters(), before, strict=True))
    assert all(p.isfinite().all() for p in network.parameters())


def test_same_micro_batch_gives_equal_gradients_twice(config: Any, world: Any, batch: Any):
    one, other = (build(config, world) for _ in range(2))
    for network in (one, other):
        loss_of(network, batch).backward()
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    assert [name for (name, p), q in pairs if p.grad is not None and not torch.equal(p.grad, q.grad)] == []


def test_each_operation_has_a_deterministic_kernel(config: Any, world: Any, batch: Any):
    torch.set_deterministic_debug_mode("error")  # torch names the first operation that has none
    loss_of(build(config, world), batch).backward()
