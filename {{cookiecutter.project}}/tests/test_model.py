"""Your model and its loop: they train, follow from the seed, and use no operation whose bits may change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import tested

from samebits.testing import Rehearsal


@pytest.fixture(scope="module")
def batch(config: Any, world: Any) -> Any:
    """The first micro-batch of the first step."""
    return tested.micro_batches(config, world)[0]


@pytest.fixture
def rehearsed(config: Any, world: Any, batch: Any) -> Callable[[], Rehearsal]:
    """A function that makes one step of the loop in train.py, and returns what it saw."""
    return partial(tested.rehearsed, config, world, batch)


def test_two_models_of_one_seed_have_equal_weights(config: Any, world: Any):
    one, other = (tested.model(config, world).state_dict() for _ in range(2))
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_loss_of_a_micro_batch_is_one_finite_number(rehearsed: Callable[[], Rehearsal]):
    loss = rehearsed().loss
    assert loss.shape == () and loss.isfinite()


def test_step_changes_weights(rehearsed: Callable[[], Rehearsal]):
    made = rehearsed()
    after = [*made.model.parameters()]
    assert any(not torch.equal(p, old) for p, old in zip(after, made.before, strict=True))
    assert all(p.isfinite().all() for p in after)


def test_same_micro_batch_gives_equal_gradients_twice(rehearsed: Callable[[], Rehearsal]):
    one, other = (rehearsed().gradients for _ in range(2))
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_each_operation_has_a_deterministic_kernel(rehearsed: Callable[[], Rehearsal]):
    torch.set_deterministic_debug_mode("error")  # torch names the first operation that has none
    rehearsed()
