"""Loops as one writes them in a train.py: parts to write them with, and whole ones."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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

    def steps(self, run: Run, steps: int = STEPS, **more: Any) -> Iterator[Step]:
        """The steps of these parts."""
        return run.steps(self.model, self.optimizer, self.dataset, steps=steps, **more)


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


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def broken(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(model, batch) * float("inf")


def summed(step: Step, model: nn.Module, compute: Any = loss_of) -> Tensor:
    """The loop over the micro-batches of a step as it is to be; the mean loss."""
    for batch in step:
        step.backward(compute(model, batch))
    return step.loss


def good(step: Step, parts: Parts, compute: Any = loss_of) -> None:
    """A step as it is to be."""
    summed(step, parts.model, compute)
    parts.optimizer.step()


def trained_with(compute: Any) -> Loop:
    """The loop with this loss."""
    return each_step(partial(good, compute=compute))


# ---- whole loops


@whole
def plain(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        for batch in step:
            step.backward(loss_of(parts.model, batch))
        parts.optimizer.step()
        step.log(loss=step.loss)
    run.finish(loss=step.loss, samples=len(parts.dataset))


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
    summed(step, parts.model)
    if step.number == 0:
        parts.optimizer.zero_grad()
    elif step.number == 2:  # after the first one, a step may be left out without a word
        parts.optimizer.step()


@whole
@each_step
def with_the_ways_to_iterate(step: Step, parts: Parts) -> None:
    """Numbered, beside another iterator, by hand; a batch is written into, and its loss has several terms."""
    if step.number == 0:
        for _, batch in enumerate(step):
            batch["x"].mul_(2)
            loss = loss_of(parts.model, batch)
            step.backward(loss + 0.1 * parts.model[3].weight.square().sum())
    elif step.number == 1:
        for batch, _ in zip(step, range(100), strict=False):
            step.backward(loss_of(parts.model, batch))
    else:
        batches = iter(step)
        while (batch := next(batches, None)) is not None:
            step.backward(loss_of(parts.model, batch))
    parts.optimizer.step()


@whole
@each_step
def with_a_second_sum(step: Step, parts: Parts) -> None:
    """As sharpness-aware minimization has it: the gradient that is used is that of other weights."""
    summed(step, parts.model)
    before = [parameter.detach().clone() for parameter in parts.model.parameters()]
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter += 0.05 * parameter.grad
    summed(step, parts.model)
    with torch.no_grad():
        for parameter, value in zip(parts.model.parameters(), before, strict=True):
            parameter.copy_(value)
    parts.optimizer.step()


class TwoMoves(torch.optim.SGD):
    """Makes two updates of each gradient, by the step() of its base class."""

    def step(self, closure: Any = None) -> None:
        for _ in range(2):
            super().step(closure)


def halves(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two optimizers of different kinds, each of a half of the parameters."""
    held = [*model.parameters()]
    return TwoMoves(held[::2], lr=0.1), torch.optim.SGD(held[1::2], lr=0.1)


@whole
def with_updates_of_two_optimizers_after_each_of_two_sums(run: Run, parts: Parts) -> None:
    both = halves(parts.model)
    for step in run.steps(parts.model, both, parts.dataset, steps=STEPS):
        for _ in range(2):
            summed(step, parts.model)
            for optimizer in both:
                optimizer.step()
    run.finish()


@whole
def with_another_model_trained_beside(run: Run, parts: Parts) -> None:
    other = nn.Linear(4, 1)
    inner = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in parts.steps(run):
        summed(step, parts.model)
        other(torch.rand(2, 4)).sum().backward()
        inner.step()
        parts.optimizer.step()
    run.finish()


@whole
def with_a_frozen_part_and_a_checkpoint(run: Run, parts: Parts) -> None:
    def compute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = checkpoint(model, batch["x"], use_reentrant=False)
        return (outputs - batch["y"]).square().mean()

    parts.model[0].requires_grad_(False)
    trained_with(compute)(run, parts)


@whole
def with_variables_that_no_later_step_reads(run: Run, parts: Parts) -> None:
    measured: dict[str, float] = {}
    loss, model, names, began, seen, table = 0.0, parts.model, ["a"], time.time(), [], {"a": [1.0]}
    for step in parts.steps(run, unsaved=("began", "seen")):
        model = model.train()
        for batch in step:
            loss = loss_of(model, batch)
            step.backward(loss)
        parts.optimizer.step()
        for name in names:
            measured = {name: loss.item()}
            step.log(**measured)
        seconds, began = time.time() - began, time.time()
        seen += [seconds, table["a"][0]]
        if step.is_last:
            best = loss
    run.finish(best=best, seen=len(seen))


class Lazy(nn.Module):
    """The model inside; makes a table at its first call, and keeps its last output, which nothing reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.table, self.last = model, None, None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(4)
        self.last = self.model(inputs * self.table)
        return self.last


@whole
def with_attributes_that_decide_no_bit(run: Run, parts: Parts) -> None:
    parts.model = Lazy(parts.model)
    for step in parts.steps(run, unsaved=("last",)):
        good(step, parts)
        parts.model.seen = [step.number]
    run.finish()


def draws(step: Step, parts: Parts) -> None:
    before = torch.rand(())
    summed(step, parts.model)
    parts.optimizer.step()
    step.log(before=before, after=torch.rand(()), later=torch.rand(()))
