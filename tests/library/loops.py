"""Loops as one writes them in a train.py: parts to write them with, and whole ones."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samebits.core.errors import NonFinite
from samebits.core.step import Step
from samebits.run import Run

STEPS = 3


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that are mappings: {"x": (4,) float32, "y": (1,) float32}."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.rand(4), "y": torch.full((1,), index / 100)}


class Words(Numbers):
    """Samples without a tensor."""

    def __getitem__(self, index: int) -> Any:
        return {"word": str(index)}


class Parts:
    """What a loop is written with."""

    def __init__(self, run: Run) -> None:
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.model.to(run.world.device)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dataset: Any = Numbers()

    def steps(self, run: Run, steps: int = STEPS) -> Iterator[Step]:
        """The steps of these parts."""
        return run.steps(self.model, self.optimizer, self.dataset, steps=steps)


Loop = Callable[[Run, Parts], None]
WHOLE: list[Loop] = []


def whole(loop: Loop) -> Loop:
    """Nothing is refused of this loop."""
    WHOLE.append(loop)
    return loop


def each_step(body: Callable[[Step, Parts], None]) -> Loop:
    """The loop whose body this is; nothing else is wrong with it."""

    def loop(run: Run, parts: Parts) -> None:
        for step in parts.steps(run):
            body(step, parts)
        run.finish()

    loop.__name__ = getattr(body, "__name__", "")
    return loop


def loss_of(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (network(batch["x"]) - batch["y"]).square().mean()


def broken(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(network, batch) * float("inf")


def good(step: Step, parts: Parts, compute: Any = loss_of) -> None:
    """A step as it is to be."""
    step.backward(compute)
    parts.optimizer.step()


def trained_with(compute: Any) -> Loop:
    """The loop with this loss function."""
    return each_step(partial(good, compute=compute))


# ---- whole loops


@whole
def plain(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        loss = step.backward(loss_of)
        parts.optimizer.step()
        step.log(loss=loss)
    run.finish(loss=loss, samples=len(parts.dataset))


@whole
@each_step
def with_the_habits_of_other_loops(step: Step, parts: Parts) -> None:
    """Gradients dropped before and after, an evaluation, a part of the model in evaluation mode."""
    parts.model[1].eval()
    parts.optimizer.zero_grad()
    good(step, parts)
    parts.optimizer.zero_grad()
    parts.model.eval()
    parts.model.train()


@whole
@each_step
def with_steps_left_out_on_purpose(step: Step, parts: Parts) -> None:
    step.backward(loss_of)
    if step.number == 0:
        parts.optimizer.zero_grad()
    elif step.number == 2:  # after the first one, a step may be left out without a word
        parts.optimizer.step()


@whole
@each_step
def with_a_step_that_is_not_finite(step: Step, parts: Parts) -> None:
    try:
        step.backward(broken if step.number == 0 else loss_of)
    except NonFinite:
        return
    parts.optimizer.step()


@whole
def with_another_model_trained_beside(run: Run, parts: Parts) -> None:
    other = nn.Linear(4, 1)
    inner = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in parts.steps(run):
        step.backward(loss_of)
        other(torch.rand(2, 4)).sum().backward()
        inner.step()
        parts.optimizer.step()
    run.finish()


@whole
def with_a_frozen_part_and_a_checkpoint(run: Run, parts: Parts) -> None:
    def compute(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = checkpoint(network, batch["x"], use_reentrant=False)
        return (outputs - batch["y"]).square().mean()

    parts.model[0].requires_grad_(False)
    trained_with(compute)(run, parts)


def draws(step: Step, parts: Parts) -> None:
    before = torch.rand(())
    step.backward(loss_of)
    parts.optimizer.step()
    step.log(before=before, after=torch.rand(()), later=torch.rand(()))
