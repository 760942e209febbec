"""Models and optimizers that do not fit the machinery or each other, and the line that is told of each."""

import copy
from collections.abc import Callable

import torch
from loops import Loop, Parts, each_step, good, loss_of, plain
from project.repro.core.step import Step
from project.repro.run import Run
from torch import Tensor, nn

UNFIT: list[tuple[Loop, str]] = []


def unfit(told: str) -> Callable[[Loop], Loop]:
    """This loop is refused, with a line that begins so."""

    def keep(loop: Loop) -> Loop:
        UNFIT.append((loop, told))
        return loop

    return keep


# ---- optimizers


@unfit("the optimizer holds 6 parameters that are not the model's, the first of shape (8, 4): give run.steps() the")
def optimizer_of_another_model(run: Run, parts: Parts) -> None:
    parts.model = copy.deepcopy(parts.model)
    plain(run, parts)


@unfit("optimizer.step(): this optimizer is not among those that run.steps() was given; no checkpoint would hold its")
def second_optimizer(run: Run, parts: Parts) -> None:
    head = torch.optim.SGD(parts.model[3].parameters(), lr=1.0)
    for step in parts.steps(run):
        good(step, parts)
        head.step()
    run.finish()


SCHEDULE = "refers to the optimizer, and no checkpoint holds its state: a resumed run would differ. Give it to run.st"


@unfit(f"a StepLR {SCHEDULE}eps(..., state={{'rates': rates}}), or compute")
def scheduler(run: Run, parts: Parts) -> None:
    rates = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)
    for step in parts.steps(run):
        good(step, parts)
        rates.step()
    run.finish()


@unfit(f"a ReduceLROnPlateau {SCHEDULE}eps(..., state={{'schedule': it}}), or compute")
def plateau(run: Run, parts: Parts) -> None:
    parts.rates = torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer)  # type: ignore[attr-defined]
    plain(run, parts)


@unfit(f"a StepLR {SCHEDULE}")
def scheduler_of_another_optimizer(run: Run, parts: Parts) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    rates, others = (torch.optim.lr_scheduler.StepLR(each, 1) for each in (parts.optimizer, other))
    for step in run.steps(parts.model, parts.optimizer, parts.dataset, steps=2, state={"schedule": others}):
        good(step, parts)
        rates.step()
    run.finish()


@unfit("optimizer.step(closure): a closure makes backward passes of its own, whose gradients no rank sums. Call optimi")
@each_step
def closure(step: Step, parts: Parts) -> None:
    step.backward(loss_of)
    parts.optimizer.step(lambda: torch.zeros(()))


@unfit("LBFGS makes several backward passes in one step, by a closure; a step has one here. Use another optimizer")
def optimizer_with_a_closure(run: Run, parts: Parts) -> None:
    parts.optimizer = torch.optim.LBFGS(parts.model.parameters())
    plain(run, parts)


@unfit("SparseAdam wants sparse gradients, which cannot be summed here. Use Adam, with sparse=False in embeddings")
def sparse_optimizer(run: Run, parts: Parts) -> None:
    parts.optimizer = torch.optim.SparseAdam(parts.model.parameters())
    plain(run, parts)


@unfit("6 parameters are held by two optimizers; give each parameter to one of them")
def one_parameter_in_two_optimizers(run: Run, parts: Parts) -> None:
    parts.optimizer = [parts.optimizer, torch.optim.SGD(parts.model.parameters(), lr=0.1)]
    plain(run, parts)


@unfit("run.steps(): no optimizer given, one or several of torch.optim wanted")
def no_optimizer(run: Run, parts: Parts) -> None:
    parts.optimizer = []
    plain(run, parts)


@unfit("run.steps(): a Sequential given among the optimizers, one or several of torch.optim wanted")
def model_in_place_of_the_optimizer(run: Run, parts: Parts) -> None:
    parts.optimizer = [parts.optimizer, parts.model]
    plain(run, parts)


@unfit("the model lies on meta, the run is on cpu: call model.to(run.world.device) before you make the optimizer")
def model_elsewhere(run: Run, parts: Parts) -> None:
    parts.model = parts.model.to("meta")
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    plain(run, parts)


@unfit("step 0: the model is in evaluation mode: call model.train() before the loop and after each evaluation")
def evaluation_mode_from_the_start(run: Run, parts: Parts) -> None:
    parts.model.eval()
    plain(run, parts)


# ---- models


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


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "synchronised_statistics": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1)),
        "1 (SyncBatchNorm): its statistics depend on the world size. Use BatchNorm: it sees a micro-batch, of one size",
    ),
    "wrapped_model": (
        lambda: nn.DataParallel(nn.Linear(4, 1)),
        "the model (DataParallel): the run sums the gradients itself. Give run.steps() the model without this wrapper",
    ),
    "sparse_embedding": (
        lambda: nn.Sequential(nn.Linear(4, 1), nn.Embedding(4, 4, sparse=True)),
        "1 (Embedding): its gradients are sparse, and the sum wants dense ones. Make it with sparse=False",
    ),
    "sparse_gradient": (Sparse, "table: its gradient is sparse, and the sum wants a dense one. Use sparse="),
    "complex_parameter": (
        Complex,
        "phase (Parameter): the sum of gradients wants real numbers. Hold it as a real param",
    ),
}
for name, (model, told) in MODELS.items():

    def loop(run: Run, parts: Parts, model: Callable[[], nn.Module] = model) -> None:
        parts.model = model()
        parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
        plain(run, parts)

    loop.__name__ = name
    unfit(told)(loop)


@unfit(
    "0.weight, 0.bias (UninitializedParameter): its shape is not known yet. Call the model once, on a batch of the ri"
)
def lazy_model(run: Run, parts: Parts) -> None:
    parts.model = nn.Sequential(nn.LazyLinear(1))
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    plain(run, parts)
