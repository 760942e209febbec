"""Your model and its loop: they train, follow from the seed, and use no operation whose bits may change."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from conftest import micro_batches, ours

from samebits.core import seeds


class Ended(Exception):
    """The one step is made."""


class Rehearsal:
    """Stands in for a run and for its only step, of one micro-batch.

    Attributes:
        model: the loop's; `before` are its parameters before the step.
        loss, gradients: of the micro-batch.
    """

    number, of, epochs, is_last = 0, 100, 0.0, True  # the last one is not evaluated in the loop
    step, done = None, 0

    def __init__(self, config: Any, world: Any, batch: Any) -> None:
        self.config, self.world, self.device, self._batch = config, world, world.device, batch

    def steps(self, model: torch.nn.Module, *given: Any, **named: Any) -> Iterator["Rehearsal"]:
        """One step."""
        for kept in named.get("state", {}).values():
            if hasattr(kept, "begin"):  # samebits.Best, Patience and Average: no checkpoint is to hold them here
                kept.begin(self)
        self.model, self.before = model, [p.detach().clone() for p in model.parameters()]
        yield self
        raise Ended

    def __iter__(self) -> Iterator[Any]:
        seeds.seed_everything(0)
        yield self._batch

    def backward(self, loss: torch.Tensor) -> None:
        """Keep what the micro-batch gives."""
        loss.backward()
        self.loss = loss.detach()
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def ends_epoch(self, every: int = 1) -> bool:
        """Nothing is evaluated."""
        return False

    def log(self, *given: Any, **named: Any) -> None:
        """Nothing is written."""

    stop = log_text = log_figure = log_artifact = _settle = log


@pytest.fixture(scope="module")
def batch(config: Any, world: Any) -> Any:
    """The first micro-batch of the first step."""
    return micro_batches(config, world)[0]


def build(config: Any, world: Any) -> torch.nn.Module:
    """A new model, made as in a run."""
    seeds.seed_everything(seeds.derive(config.seed, "init"))
    return ours("model").build(config).to(world.device)


@pytest.fixture
def rehearsed(config: Any, world: Any, batch: Any) -> Any:
    """A function that makes one step of the loop in train.py, and returns what it saw."""

    def rehearsed() -> Rehearsal:
        rehearsal = Rehearsal(config, world, batch)
        seeds.seed_everything(seeds.derive(config.seed, "init"))
        with suppress(Ended):
            ours("train").train(rehearsal)
        return rehearsal

    return rehearsed


def test_two_models_of_one_seed_have_equal_weights(config: Any, world: Any):
    one, other = (build(config, world).state_dict() for _ in range(2))
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_loss_of_a_micro_batch_is_one_finite_number(rehearsed: Any):
    loss = rehearsed().loss
    assert loss.shape == () and loss.isfinite()


def test_step_changes_weights(rehearsed: Any):
    made = rehearsed()
    after = [*made.model.parameters()]
    assert any(not torch.equal(p, old) for p, old in zip(after, made.before, strict=True))
    assert all(p.isfinite().all() for p in after)


def test_same_micro_batch_gives_equal_gradients_twice(rehearsed: Any):
    one, other = (rehearsed().gradients for _ in range(2))
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_each_operation_has_a_deterministic_kernel(rehearsed: Any):
    torch.set_deterministic_debug_mode("error")  # torch names the first operation that has none
    rehearsed()
