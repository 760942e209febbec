"""Loops as one writes them in a train.py, each with a slip or with what does not fit, and the line that is told."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from loops import Loop, Parts, Words, broken, each_step, good, loss_of, plain, trained_with
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samebits.core.errors import NonFinite
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
    "detached loss": (lambda network, batch: loss_of(network, batch).detach(), GAVE_NONE),
    "loss without return": (
        lambda network, batch: None,
        "step 0: the loss function returned None, expected a scalar mean loss",
    ),
    "loss of each sample": (
        lambda network, batch: (network(batch["x"]) - batch["y"]).square(),
        "step 0: the loss function returned a tensor of shape (8, 1), expected a scalar mean loss",
    ),
}
for name, (compute, message) in LOSSES.items():
    kept(name, message, trained_with(compute))


# ---- the number of steps


def with_length(run: Run, parts: Parts, **length: int) -> None:
    for step in run.steps(parts.model, parts.optimizer, parts.dataset, **length):
        step.backward(loss_of)
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


# ---- optimizers that do not fit


@slip("optimizer.step(): this optimizer is not among those that run.steps() was given; no checkpoint would hold its")
def second_optimizer(run: Run, parts: Parts) -> None:
    head = torch.optim.SGD(parts.model[3].parameters(), lr=1.0)
    for step in parts.steps(run):
        good(step, parts)
        head.step()
    run.finish()


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
    step.backward(loss_of)
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
LBFGS: LBFGS makes several backward passes in one step, by a closure; a step has one here. Use another optimizer
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
