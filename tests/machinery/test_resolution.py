"""Gradients that the grid of the sum is too coarse for are told, by name; others are not."""

from functools import partial

import pytest
import torch
from project.repro.training.parallel import OrderFree
from project.repro.training.world import World
from states import parallel_of
from torch import Tensor, nn

ALONE = World(0, 1, torch.device("cpu"))
MICRO_BATCHES = 4


def told(scale: float, other: float = 1.0, lsb: int = -44, steps: int = 1) -> list[str | None]:
    """The lines of so many steps: `small` has gradients of about `scale`, `large` of about `other`."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"small": torch.ones(1000), "large": torch.ones(10)})
    settings = parallel_of(MICRO_BATCHES, lsb=lsb)
    gradients = OrderFree(model, settings, ALONE)

    def loss(inputs: Tensor) -> Tensor:
        return (model["small"] * inputs * scale).sum() + (model["large"] * other).sum()

    lines = []
    for _ in range(steps):
        for micro_batch in gradients.micro_batches(range(MICRO_BATCHES), measures=True):
            generator = torch.Generator().manual_seed(micro_batch)
            gradients.add(partial(loss, torch.randn(1000, generator=generator)))
        gradients.reduce()
        assert all(parameter.grad.isfinite().all() for parameter in model.values())
        lines.append(gradients.told())
    return lines


@pytest.mark.parametrize("scale", [1.0, 1e-3, 2e-6])
def test_gradients_that_keep_all_bits_are_not_told(scale: float):
    assert told(scale) == [None]


def test_small_gradients_are_told_with_the_grid_that_fits_them():
    (line,) = told(scale=1e-7, other=1e-4)
    assert line and line.startswith("gradients of small: below 9.5e-07, so parallel.lsb=-44 sums them less exactly")
    assert "large" not in line.partition(":")[0]
    assert "parallel.lsb=-56 is the finest that leaves room" in line  # for `large`
    (line,) = told(scale=1e-7, other=1e-2, lsb=-49)
    assert line is None
    (line,) = told(scale=1e-9, other=1e-6)
    assert line and "parallel.lsb=-62 is the finest that leaves room for gradients 1024 times as large" in line
    assert told(scale=1e-9, other=1e-6, lsb=-62) == [None]


def test_what_rounding_leaves_of_a_zero_is_not_told():
    """The gradient of a bias before a normalisation is zero, but for rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    settings = parallel_of(MICRO_BATCHES)
    gradients = OrderFree(model, settings, ALONE)
    for _ in gradients.micro_batches(range(MICRO_BATCHES), measures=True):
        gradients.add(lambda: model(torch.randn(32, 8)).square().mean())
    gradients.reduce()
    assert 0 < model[0].bias.grad.abs().max() < 2.0**-20
    assert gradients.told() is None


def test_gradients_that_vanish_are_told():
    (line,) = told(scale=1e-15, other=1e-12)
    assert line and "100% became 0" in line and line.startswith("gradients of ")


def test_each_parameter_is_told_once():
    first, second = told(scale=1e-9, other=1e-9, steps=2)
    assert first and second is None


def test_step_that_does_not_measure_tells_nothing():
    model = nn.Linear(1, 1)
    settings = parallel_of(MICRO_BATCHES)
    gradients = OrderFree(model, settings, ALONE)
    for _ in gradients.micro_batches(range(MICRO_BATCHES)):
        gradients.add(lambda: model(torch.ones(1, 1)).sum() * 1e-12)
    gradients.reduce()
    assert gradients.told() is None
