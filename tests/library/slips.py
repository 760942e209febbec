"""Loops as one writes them in a train.py, each with a slip or with what does not fit, and the line that is told."""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from loops import STEPS, Loop, Parts, Words, each_step, good, halves, loss_of, plain, summed, trained_with
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samebits.core.step import Step
from samebits.run import Run

SLIPS: dict[str, tuple[Loop, str]] = {}


def kept(name: str, message: str, loop: Loop) -> Loop:
    """This loop is refused, with a line that begins so."""
    SLIPS[name] = loop, message
    return loop


def slip(message: str) -> Callable[[Loop], Loop]:
    """The same, under the name of the function."""
    return lambda loop: kept(loop.__name__, message, loop)


# ---- the two lines of each step


@slip("step 0: nothing was trained: iterate over the step, and call step.backward(loss) for each batch")
@each_step
def without_micro_batches(step: Step, parts: Parts) -> None:
    step.log(loss=0)


NOT_CALLED = "step.backward(loss) was not called; call it once for each micro-batch"


@slip(f"micro-batch 0: {NOT_CALLED}")
@each_step
def without_backward(step: Step, parts: Parts) -> None:
    for _ in step:
        pass


@slip(f"micro-batch 0: {NOT_CALLED}")
@each_step
def micro_batches_in_a_list(step: Step, parts: Parts) -> None:
    for batch in [*step]:
        step.backward(loss_of(parts.model, batch))


@slip(f"micro-batch 2: {NOT_CALLED}")
@each_step
def micro_batch_left_out(step: Step, parts: Parts) -> None:
    for number, batch in enumerate(step):
        if number == 2:
            continue
        step.backward(loss_of(parts.model, batch))


TWICE = "step.backward(loss) was called twice; add several losses up, and call it once for each micro-batch"


@slip(f"micro-batch 0: {TWICE}")
@each_step
def backward_twice(step: Step, parts: Parts) -> None:
    for batch in step:
        step.backward(loss_of(parts.model, batch))
        step.backward(loss_of(parts.model, batch))


@slip(f"micro-batch 1: {TWICE}")
@each_step
def backward_twice_and_the_error_caught(step: Step, parts: Parts) -> None:
    for number, batch in enumerate(step):
        step.backward(loss_of(parts.model, batch))
        if number == 1:
            with suppress(Exception):
                step.backward(loss_of(parts.model, batch))


OUTSIDE = "step.backward(loss) came outside of the loop over the step's micro-batches: call it once for each of them"


@slip(OUTSIDE)
@each_step
def backward_after_the_micro_batches(step: Step, parts: Parts) -> None:
    for batch in step:
        loss = loss_of(parts.model, batch)
        step.backward(loss)
    step.backward(loss)


@slip(OUTSIDE)
@each_step
def backward_without_micro_batches(step: Step, parts: Parts) -> None:
    step.backward(loss_of(parts.model, {"x": torch.rand(8, 4), "y": torch.rand(8, 1)}))


LEFT = "the loop over its micro-batches was left (break, return, zip() with fewer others, or an error that was caught)"


@slip(f"step 0: {LEFT}")
@each_step
def micro_batches_left(step: Step, parts: Parts) -> None:
    for batch in step:
        step.backward(loss_of(parts.model, batch))
        break


@slip(f"step 0: {LEFT}")
@each_step
def micro_batches_left_by_an_error(step: Step, parts: Parts) -> None:
    with suppress(ValueError):
        for batch in step:
            step.backward(loss_of(parts.model, batch))
            raise ValueError


@slip(f"step 0: {LEFT}")
@each_step
def micro_batches_beside_fewer_others(step: Step, parts: Parts) -> None:
    batches = iter(step)
    for _, batch in zip(range(2), batches, strict=False):
        step.backward(loss_of(parts.model, batch))


NOT_ENDED = "step 0: a loop over its micro-batches is not at its end, and another one begins: let `for batch in step`"


@slip(NOT_ENDED)
@each_step
def micro_batches_within_micro_batches(step: Step, parts: Parts) -> None:
    for _ in step:
        summed(step, parts.model)


@slip(NOT_ENDED)
@each_step
def micro_batches_begun_twice(step: Step, parts: Parts) -> None:
    both = iter(step), iter(step)
    for batch, other in zip(*both, strict=True):
        step.backward(loss_of(parts.model, batch) + loss_of(parts.model, other))


@slip("step 0: it is over: iterate over each step of run.steps() in its own turn")
def micro_batches_of_an_earlier_step(run: Run, parts: Parts) -> None:
    steps = parts.steps(run)
    first = next(steps)
    good(first, parts)
    for _ in steps:
        good(first, parts)
    run.finish()


@slip("step 0: nothing was trained: ")
def steps_in_a_list(run: Run, parts: Parts) -> None:
    for step in [*parts.steps(run)]:
        good(step, parts)
    run.finish()


@slip("step 0: step.loss is known once the loop over its micro-batches has ended")
@each_step
def loss_before_the_sum(step: Step, parts: Parts) -> None:
    for batch in step:
        step.backward(loss_of(parts.model, batch))
        step.log(loss=step.loss)


@slip("step 0: micro-batch 0 was written into, and is wanted once more: change a copy of it")
@each_step
def second_sum_of_what_was_written_into(step: Step, parts: Parts) -> None:
    for _ in range(2):
        for batch in step:
            batch["x"].mul_(2)
            step.backward(loss_of(parts.model, batch))


@slip("optimizer.step() came without gradients: call it after the loop over the step, which sums them")
@each_step
def update_before_the_sum(step: Step, parts: Parts) -> None:
    parts.optimizer.step()
    summed(step, parts.model)


@slip("optimizer.step() came without gradients: ")
@each_step
def update_for_each_micro_batch(step: Step, parts: Parts) -> None:
    for batch in step:
        step.backward(loss_of(parts.model, batch))
        parts.optimizer.step()


@slip("optimizer.step() came without gradients: ")
@each_step
def update_within_the_second_sum(step: Step, parts: Parts) -> None:
    summed(step, parts.model)
    for batch in step:
        step.backward(loss_of(parts.model, batch))
        parts.optimizer.step()


@slip("optimizer.step() came without gradients: ")
@each_step
def gradients_dropped_before_the_update(step: Step, parts: Parts) -> None:
    summed(step, parts.model)
    parts.optimizer.zero_grad()
    parts.optimizer.step()


UPDATED = "optimizer.step() was called twice with the same gradients: call it once after each loop over the step"


@slip(UPDATED)
@each_step
def update_twice(step: Step, parts: Parts) -> None:
    good(step, parts)
    parts.optimizer.step()


@slip(UPDATED)
def update_twice_after_the_second_sum(run: Run, parts: Parts) -> None:
    """By the first of two optimizers, with the other one's update between."""
    both = halves(parts.model)
    for step in run.steps(parts.model, both, parts.dataset, steps=STEPS):
        for _ in range(2):
            summed(step, parts.model)
            for optimizer in both:
                optimizer.step()
        both[0].step()
    run.finish()


@slip("step 0: optimizer.step() was never called; call it after the loop over the step")
@each_step
def without_update(step: Step, parts: Parts) -> None:
    step.log(loss=summed(step, parts.model))


@slip("step 0: optimizer.step() was never called; call it after the loop over the step")
@each_step
def without_update_after_the_second_sum(step: Step, parts: Parts) -> None:
    good(step, parts)
    summed(step, parts.model)


@slip("step 0: optimizer.step() was never called; call it after the loop over the step")
def update_after_the_loop(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        summed(step, parts.model)
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

GAVE_NONE = "the loss gave no gradient to any parameter of the model of this run: compute it by calling the model"


@slip(GAVE_NONE)
def loss_of_another_model(run: Run, parts: Parts) -> None:
    other = copy.deepcopy(parts.model)
    trained_with(lambda model, batch: loss_of(other, batch))(run, parts)


@slip(GAVE_NONE)
@each_step
def loss_of_a_copy_made_in_the_loop(step: Step, parts: Parts) -> None:
    other = copy.deepcopy(parts.model)
    good(step, parts, lambda model, batch: loss_of(other, batch))


@slip(GAVE_NONE)
@each_step
def loss_without_gradients(step: Step, parts: Parts) -> None:
    with torch.no_grad():
        good(step, parts)


OWN_BACKWARD = "a backward() of your own reached the model: give the loss to step.backward(loss) instead"


@slip(OWN_BACKWARD)
@each_step
def backward_of_the_loss(step: Step, parts: Parts) -> None:
    for batch in step:
        loss_of(parts.model, batch).backward()
    parts.optimizer.step()


@slip(OWN_BACKWARD)
@each_step
def backward_of_the_loss_and_of_the_step(step: Step, parts: Parts) -> None:
    for batch in step:
        loss = loss_of(parts.model, batch)
        loss.backward(retain_graph=True)
        step.backward(loss)


@slip(OWN_BACKWARD)
@each_step
def backward_of_a_part_and_the_error_caught(step: Step, parts: Parts) -> None:
    for batch in step:
        with suppress(Exception):
            parts.model[3].weight.square().sum().backward()
        step.backward(loss_of(parts.model, batch))


@slip(OWN_BACKWARD)
@each_step
def backward_after_the_update(step: Step, parts: Parts) -> None:
    good(step, parts)
    parts.model(torch.rand(8, 4)).sum().backward()


@slip(
    "0.bias: its gradient came twice for one micro-batch. If the model calls torch.utils.checkpoint, give it "
    "use_reentrant"
)
@each_step
def two_reentrant_checkpoints(step: Step, parts: Parts) -> None:
    def compute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = batch["x"].clone().requires_grad_()
        halves = [checkpoint(model[0], inputs, use_reentrant=True) for _ in range(2)]
        return (halves[0] + halves[1]).square().mean()

    summed(step, parts.model, compute)


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


LOSSES = {
    "detached loss": (lambda model, batch: loss_of(model, batch).detach(), GAVE_NONE),
    "loss without return": (
        lambda model, batch: None,
        "step 0: step.backward() was given None, expected a scalar mean loss",
    ),
    "loss that is a number": (
        lambda model, batch: loss_of(model, batch).item(),
        "step 0: step.backward() was given ",
    ),
    "loss of each sample": (
        lambda model, batch: (model(batch["x"]) - batch["y"]).square(),
        "step 0: step.backward() was given a tensor of shape (8, 1), expected a scalar mean loss",
    ),
}
for name, (compute, message) in LOSSES.items():
    kept(name, message, trained_with(compute))


# ---- the number of steps


def with_length(run: Run, parts: Parts, **length: int) -> None:
    for step in run.steps(parts.model, parts.optimizer, parts.dataset, **length):
        summed(step, parts.model)
    run.finish()


LENGTHS = {
    "no steps": ({"steps": 0}, "0 steps of a dataset of 100 samples, at least one of each wanted"),
    "neither epochs nor steps": ({}, "epochs=None and steps=None given, one of the two wanted"),
    "epochs and steps": ({"epochs": 1, "steps": 1}, "epochs=1 and steps=1 given, one of the two wanted"),
}
for name, (length, message) in LENGTHS.items():
    kept(name, f"run.steps(): {message}", partial(with_length, **length))


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


@slip("run.finish() came in step 1, before its end: let the loop over run.steps() come to its end, without break. To ")
def finish_after_a_break(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        good(step, parts)
        if step.number == 1:
            break
    run.finish()


@slip("run.finish() came in step 2, before its end: let the loop over run.steps() come to its end, without break. To ")
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


# ---- optimizers that do not fit


@slip("optimizer.step(): this optimizer is not among those that run.steps() was given; no checkpoint would hold its")
def second_optimizer(run: Run, parts: Parts) -> None:
    head = torch.optim.SGD(parts.model[3].parameters(), lr=1.0)
    for step in parts.steps(run):
        good(step, parts)
        head.step()
    run.finish()


@slip("an optimizer was given a parameter of shape (1,) after run.steps() that is not the model's: no checkpoint can n")
@each_step
def parameter_that_is_not_the_models(step: Step, parts: Parts) -> None:
    """A temperature of the loss, say; the weights of a run would lack it."""
    parts.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    good(step, parts)


@slip("an optimizer was given a parameter of shape (4,) after run.steps() that is not the model's: no checkpoint can n")
@each_step
def parameter_in_the_place_of_the_models(step: Step, parts: Parts) -> None:
    """Their number stays the same."""
    good(step, parts)
    parts.optimizer.param_groups[0]["params"][-1] = nn.Parameter(torch.zeros(4))


SCHEDULE = "refers to the optimizer, and no checkpoint holds its state: a resumed run would differ. Give it to run.st"


@slip(f"a StepLR {SCHEDULE}eps(..., state={{'rates': rates}}), or compute")
def scheduler(run: Run, parts: Parts) -> None:
    rates = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)
    for step in parts.steps(run):
        good(step, parts)
        rates.step()
    run.finish()


@slip(f"a StepLR {SCHEDULE}")
def scheduler_of_another_optimizer(run: Run, parts: Parts) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    rates, others = (torch.optim.lr_scheduler.StepLR(each, 1) for each in (parts.optimizer, other))
    for step in run.steps(parts.model, parts.optimizer, parts.dataset, steps=2, state={"schedule": others}):
        good(step, parts)
        rates.step()
    run.finish()


@slip("optimizer.step(closure): a closure makes backward passes of its own, whose gradients no rank sums. Call optimi")
@each_step
def closure(step: Step, parts: Parts) -> None:
    summed(step, parts.model)
    parts.optimizer.step(lambda: torch.zeros(()))


# ---- what stands in place of the model, the optimizer or the dataset


class Sparse(nn.Module):
    """Its gradient is sparse, and nothing of it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.rand(4, 4)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + nn.functional.embedding((x[:, 0] > 0.5).long(), self.table, sparse=True))


class Complex(nn.Linear):
    """Holds a complex number beside its weights."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))


Change = Callable[[Parts], dict[str, Any]]


def with_sgd(model: nn.Module) -> dict[str, Any]:
    """A model, and the optimizer that goes with it."""
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def with_others(run: Run, parts: Parts, change: Change) -> None:
    vars(parts).update(change(parts))
    plain(run, parts)


UNFIT: dict[str, Change] = {
    "copied": lambda parts: {"model": copy.deepcopy(parts.model)},
    "plateau": lambda parts: {"rates": torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer)},
    "LBFGS": lambda parts: {"optimizer": torch.optim.LBFGS(parts.model.parameters())},
    "SparseAdam": lambda parts: {"optimizer": torch.optim.SparseAdam(parts.model.parameters())},
    "held twice": lambda parts: {"optimizer": [parts.optimizer, torch.optim.SGD(parts.model.parameters(), lr=0.1)]},
    "no optimizer": lambda parts: {"optimizer": []},
    "no optimizer but a model": lambda parts: {"optimizer": [parts.optimizer, parts.model]},
    "on meta": lambda parts: with_sgd(parts.model.to("meta")),
    "evaluated": lambda parts: {"model": parts.model.eval()},
    "synced": lambda parts: with_sgd(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))),
    "wrapped": lambda parts: with_sgd(nn.DataParallel(nn.Linear(4, 1))),
    "sparse embedding": lambda parts: with_sgd(nn.Sequential(nn.Linear(4, 1), nn.Embedding(4, 4, sparse=True))),
    "sparse gradient": lambda parts: with_sgd(Sparse()),
    "complex": lambda parts: with_sgd(Complex()),
    "lazy": lambda parts: with_sgd(nn.Sequential(nn.LazyLinear(1))),
    "words": lambda parts: {"dataset": Words()},
    "loader": lambda parts: {"dataset": torch.utils.data.DataLoader(parts.dataset)},
    "empty dataset": lambda parts: {"dataset": torch.utils.data.Subset(parts.dataset, [])},
}
for line in f"""
copied: the optimizer holds 6 parameters that are not the model's, the first of shape (8, 4): give run.steps() the
plateau: a ReduceLROnPlateau {SCHEDULE}eps(..., state={{'schedule': it}}), or compute
LBFGS: LBFGS makes backward passes of its own, by a closure, whose gradients no rank sums. Use another optimizer
SparseAdam: SparseAdam wants sparse gradients, which cannot be summed here. Use Adam, with sparse=False in embeddings
held twice: 6 parameters are held by two optimizers; give each parameter to one of them
no optimizer: run.steps(): no optimizer given, one or several of torch.optim wanted
no optimizer but a model: run.steps(): a Sequential given among the optimizers, one or several of torch.optim wanted
on meta: the model lies on meta, the run is on cpu: call model.to(run.world.device) before you make the optimizer
evaluated: step 0: the model is in evaluation mode: call model.train() before the loop and after each evaluation
synced: 1 (SyncBatchNorm): its statistics depend on the world size. Use BatchNorm: it sees a micro-batch, of one size
wrapped: the model (DataParallel): the run sums the gradients itself. Give run.steps() the model without this wrapper
sparse embedding: 1 (Embedding): its gradients are sparse, and the sum wants dense ones. Make it with sparse=False
sparse gradient: table: its gradient is sparse, and the sum wants a dense one. Use sparse=
complex: phase (Parameter): the sum of gradients wants real numbers. Hold it as a real param
lazy: 0.weight, 0.bias (UninitializedParameter): its shape is not known yet. Call the model once, on a batch of the ri
words: a batch holds no tensor: let the dataset's items hold tensors, arrays or numbers
loader: run.steps(): a DataLoader given, a dataset with __len__ and __getitem__ wanted: the run makes its own loader
empty dataset: run.steps(): 3 steps of a dataset of 0 samples, at least one of each wanted
""".strip().splitlines():
    name, message = line.split(": ", 1)
    kept(name, message, partial(with_others, change=UNFIT[name]))
assert UNFIT.keys() <= SLIPS.keys()
