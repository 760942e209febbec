"""Loops as one writes them in a train.py, each with a slip, and the line that is told of it."""

import copy
from collections.abc import Callable

import torch
from loops import Loop, Parts, Words, broken, each_step, good, loss_of, plain, trained_with
from project.repro.core.errors import NonFinite
from project.repro.core.step import Step
from project.repro.run import Run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SLIPS: list[tuple[Loop, str]] = []


def slip(told: str) -> Callable[[Loop], Loop]:
    """This loop is refused, with a line that begins so."""

    def keep(loop: Loop) -> Loop:
        SLIPS.append((loop, told))
        return loop

    return keep


# ---- the two lines of each step


@slip("step 0: step.backward() was never called; without it nothing is trained")
@each_step
def without_backward(step: Step, parts: Parts) -> None:
    step.log(loss=0)


@slip("step 0: step.backward() was called twice; call it once per step")
@each_step
def backward_twice(step: Step, parts: Parts) -> None:
    step.backward(loss_of)
    step.backward(loss_of)


@slip("optimizer.step() came without gradients: call step.backward(...) before it, in each step")
@each_step
def update_before_backward(step: Step, parts: Parts) -> None:
    parts.optimizer.step()
    step.backward(loss_of)


@slip("optimizer.step() came without gradients: ")
@each_step
def gradients_dropped_before_the_update(step: Step, parts: Parts) -> None:
    step.backward(loss_of)
    parts.optimizer.zero_grad()
    parts.optimizer.step()


@slip("optimizer.step() came without gradients: ")
@each_step
def update_after_a_gradient_that_is_not_finite(step: Step, parts: Parts) -> None:
    try:
        step.backward(broken)
    except NonFinite:
        step.log(skipped=1)
    parts.optimizer.step()


@slip("step 0: optimizer.step() was never called; call it after step.backward(...)")
@each_step
def without_update(step: Step, parts: Parts) -> None:
    step.log(loss=step.backward(loss_of))


@slip("step 0: optimizer.step() was never called; call it after step.backward(...)")
def update_after_the_loop(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        step.backward(loss_of)
    parts.optimizer.step()
    run.finish()


@slip("step 1: the model is in evaluation mode: call model.train() before the loop and after each evaluation")
@each_step
def evaluation_mode_left_on(step: Step, parts: Parts) -> None:
    good(step, parts)
    parts.model.eval()


@slip("metric loss: a tensor of shape (2,) given, one number wanted")
@each_step
def metric_of_two_numbers(step: Step, parts: Parts) -> None:
    good(step, parts)
    step.log(loss=torch.zeros(2))


# ---- the loss

GAVE_NONE = "the loss gave no gradient to any parameter of the model of this run: compute it with the network"


@slip(GAVE_NONE)
def loss_of_another_model(run: Run, parts: Parts) -> None:
    other = copy.deepcopy(parts.model)
    trained_with(lambda network, batch: loss_of(other, batch))(run, parts)


@slip(GAVE_NONE)
@each_step
def loss_of_a_copy_made_in_the_loop(step: Step, parts: Parts) -> None:
    other = copy.deepcopy(parts.model)
    step.backward(lambda network, batch: loss_of(other, batch))


OWN_BACKWARD = "a backward() of your own reached the model: let the loss function return the loss, step.backward() does"


@slip(OWN_BACKWARD)
@each_step
def backward_in_the_loss(step: Step, parts: Parts) -> None:
    def compute(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(network, batch)
        loss.backward(retain_graph=True)
        return loss

    step.backward(compute)


@slip(OWN_BACKWARD)
@each_step
def backward_of_a_part_in_the_loss(step: Step, parts: Parts) -> None:
    def compute(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        parts.model[3].weight.square().sum().backward()
        return loss_of(network, batch)

    step.backward(compute)


@slip(OWN_BACKWARD)
@each_step
def backward_in_the_loop(step: Step, parts: Parts) -> None:
    good(step, parts)
    parts.model(torch.rand(8, 4)).sum().backward()


@slip(
    "0.bias: its gradient came twice for one micro-batch. If the model calls torch.utils.checkpoint, give it "
    "use_reentrant"
)
@each_step
def two_reentrant_checkpoints(step: Step, parts: Parts) -> None:
    def compute(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        network(batch["x"])  # DistributedDataParallel wants its own forward pass, too
        inputs = batch["x"].clone().requires_grad_()
        halves = [checkpoint(parts.model[0], inputs, use_reentrant=True) for _ in range(2)]
        return (halves[0] + halves[1]).square().mean()

    step.backward(compute)


CHANGED = "frozen, thawed or replaced after run.steps(); do that before it"


@slip(f"3.bias, 3.weight: {CHANGED}")
@each_step
def frozen_on_the_way(step: Step, parts: Parts) -> None:
    good(step, parts)
    parts.model[3].requires_grad_(False)


@slip(f"0.bias, 0.weight: {CHANGED}")
def thawed_on_the_way(run: Run, parts: Parts) -> None:
    parts.model[0].requires_grad_(False)
    for step in parts.steps(run):
        parts.model[0].requires_grad_(step.number == 1)
        good(step, parts)
    run.finish()


@slip(f"0.weight: {CHANGED}")
@each_step
def replaced_on_the_way(step: Step, parts: Parts) -> None:
    parts.model[0].weight = nn.Parameter(torch.zeros(8, 4))
    good(step, parts)


def bare_model(run: Run, parts: Parts) -> None:
    """A slip where the network is another one: with DistributedDataParallel."""
    trained_with(lambda network, batch: loss_of(parts.model, batch))(run, parts)


LOSSES = {
    "detached_loss": (lambda network, batch: loss_of(network, batch).detach(), GAVE_NONE),
    "loss_without_return": (
        lambda network, batch: None,
        "step 0: the loss function returned None, expected a scalar mean loss",
    ),
    "loss_of_each_sample": (
        lambda network, batch: (network(batch["x"]) - batch["y"]).square(),
        "step 0: the loss function returned a tensor of shape (8, 1), expected a scalar mean loss",
    ),
}
for name, (compute, told) in LOSSES.items():
    slip(told)(trained_with(compute)).__name__ = name


# ---- the dataset, and the number of steps


@slip("a batch holds no tensor: let the dataset's items hold tensors, arrays or numbers")
def batch_without_tensors(run: Run, parts: Parts) -> None:
    parts.dataset = Words()
    plain(run, parts)


@slip("run.steps(): a DataLoader given, a dataset with __len__ and __getitem__ wanted: the run makes its own loader")
def loader_in_place_of_the_dataset(run: Run, parts: Parts) -> None:
    parts.dataset = torch.utils.data.DataLoader(parts.dataset)
    plain(run, parts)


@slip("run.steps(): 3 steps of a dataset of 0 samples, at least one of each wanted")
def empty_dataset(run: Run, parts: Parts) -> None:
    parts.dataset = torch.utils.data.Subset(parts.dataset, [])
    plain(run, parts)


@slip("run.steps(): 0 steps of a dataset of 100 samples, at least one of each wanted")
def no_steps(run: Run, parts: Parts) -> None:
    for step in parts.steps(run, steps=0):
        step.backward(loss_of)
    run.finish()


@slip("run.steps(): epochs=None and steps=None given, one of the two wanted")
def neither_epochs_nor_steps(run: Run, parts: Parts) -> None:
    for step in run.steps(parts.model, parts.optimizer, parts.dataset):
        step.backward(loss_of)
    run.finish()


@slip("run.steps(): epochs=1 and steps=1 given, one of the two wanted")
def epochs_and_steps(run: Run, parts: Parts) -> None:
    for step in run.steps(parts.model, parts.optimizer, parts.dataset, epochs=1, steps=1):
        step.backward(loss_of)
    run.finish()


# ---- the loop as a whole, and its end


@slip("run.steps() was called twice: a run is one loop; give it all epochs or steps at once")
def second_loop(run: Run, parts: Parts) -> None:
    for _ in range(2):
        for step in parts.steps(run):
            good(step, parts)
    run.finish()


@slip("run.finish() was never called: it writes the weights and the receipt")
def without_finish(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        good(step, parts)


@slip("run.finish() came after step 0: let the loop go through all of run.steps()")
def steps_without_a_loop(run: Run, parts: Parts) -> None:
    parts.steps(run)
    run.finish()


@slip("run.finish() came after step 1: let the loop go through all of run.steps()")
def finish_after_a_break(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        good(step, parts)
        if step.number == 1:
            break
    run.finish()


@slip("run.finish() came after step 2: let the loop go through all of run.steps()")
def finish_in_the_last_step(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        good(step, parts)
        if step.is_last:
            run.finish()


@slip("run.finish() was called twice: call it once, with all metrics")
def finish_twice(run: Run, parts: Parts) -> None:
    plain(run, parts)
    run.finish(more=1)


@slip("metric name: 'plain' given, one number wanted")
def metric_that_is_a_word(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        good(step, parts)
    run.finish(name="plain")  # type: ignore[arg-type]
