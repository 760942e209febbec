"""The things that people bring: models, losses, optimizers and schedules, each as a training of a few steps."""

import os
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import samebits as sb

STEPS, WIDTH, WORDS = 4, 32, 12  # a row of WIDTH is what parallel.shard=full can cut off
Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """{"x": (WIDTH,) float32, "words": (4,) int64 below WORDS, "y": () float32}."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.rand(WIDTH), "words": torch.randint(WORDS, (4,)), "y": torch.tensor(index / 200)}


@dataclass
class Case:
    """A training; `update` is the body of its loop after the gradients of a loss; there may be `more` of both."""

    model: nn.Module
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    loss: Loss
    update: Callable[[Any, Tensor], object]
    state: dict[str, Any] = field(default_factory=dict)
    more: Sequence[tuple[Loss, Callable[[Any, Tensor], object]]] = ()
    steps: int = STEPS
    order: Any = None
    is_enough: Callable[[Any], bool] = lambda step: False
    ends: Callable[[], object] = lambda: None  # after the loop
    dataset: torch.utils.data.Dataset[Any] = field(default_factory=Numbers)


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def square(network: nn.Module, batch: Batch) -> Tensor:
    outputs = network(batch["x"])
    return (outputs.float().mean(-1) - batch["y"]).square().mean()


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def trained(model: nn.Module, loss: Loss = square, **keys: Any) -> Case:
    """The plain loop."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, **keys)
    return Case(model, optimizer, loss, lambda step, loss: optimizer.step())


# ---- optimizers

WITHOUT = "Optimizer", "LBFGS", "SparseAdam", "Muon"  # the first is no optimizer, two are refused, Muon stands below
KINDS = [name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type) and name not in WITHOUT]


def updated_by(name: str) -> Case:
    model = perceptron()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    return Case(model, optimizer, square, lambda step, loss: optimizer.step())


for name in KINDS:
    CASES[name] = lambda name=name: updated_by(name)


@case
def several_optimizers() -> Case:
    model = perceptron()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == many] for many in (True, False))
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors, lr=0.01, fused=True)]
    return Case(model, optimizers, square, lambda step, loss: [optimizer.step() for optimizer in optimizers])


@case
def two_networks_that_take_turns() -> Case:
    """As in a GAN: one forges, the other one tells apart; each is updated in every second step."""
    forger, judge = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model = nn.ModuleDict({"forger": forger, "judge": judge})
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01, fused=True) for part in (forger, judge)]
    turn = [0]

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        forged = network["forger"](torch.rand(len(batch["x"]), WIDTH))
        if turn[0] == 0:
            return F.softplus(-network["judge"](forged)).mean()
        real = F.softplus(-network["judge"](batch["x"])).mean()
        return real + F.softplus(network["judge"](forged.detach())).mean()

    def update(step: Any, loss: Tensor) -> None:
        optimizers[turn[0]].step()
        turn[0] = (step.number + 1) % 2

    return Case(model, optimizers, loss, update, {"turn": Turn(turn)})


@case
def two_networks_in_each_step() -> Case:
    """A GAN as it is written: in each step the judge is updated, then the forger, by a sum of its own."""
    forger, judge = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model = nn.ModuleDict({"forger": forger, "judge": judge})
    forging, judging = (torch.optim.Adam(part.parameters(), lr=0.01, fused=True) for part in (forger, judge))

    def forged(batch: Batch) -> Tensor:
        return forger(torch.rand(len(batch["x"]), WIDTH))

    def of_the_judge(model: nn.Module, batch: Batch) -> Tensor:
        return F.softplus(-judge(batch["x"])).mean() + F.softplus(judge(forged(batch).detach())).mean()

    def of_the_forger(model: nn.Module, batch: Batch) -> Tensor:
        return F.softplus(-judge(forged(batch))).mean()

    more = [(of_the_forger, lambda step, loss: forging.step())]
    return Case(model, [forging, judging], of_the_judge, lambda step, loss: judging.step(), more=more)


@case
def two_losses_in_turn() -> Case:
    """The second sum has another loss, which uses a part of the model: the rest has no gradient, and stays."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)

    def of_a_part(model: nn.Module, batch: Batch) -> Tensor:
        return model[0](batch["x"] + 0.1 * torch.rand_like(batch["x"])).square().mean()

    def update(step: Any, loss: Tensor) -> None:
        held = [parameter.grad is not None for parameter in model.parameters()]
        assert held == [True, True, False, False, False, False], held
        optimizer.step()

    return Case(model, optimizer, square, lambda step, loss: optimizer.step(), more=[(of_a_part, update)])


class Turn:
    """An object of the loop's own."""

    def __init__(self, turn: list[int]) -> None:
        self.turn = turn

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn[0] = state["turn"]


# ---- schedules

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
}


def scheduled_by(name: str) -> Case:
    trained_ = trained(perceptron())
    assert isinstance(trained_.optimizers, torch.optim.Optimizer)
    schedule = SCHEDULES[name](trained_.optimizers)
    optimizer = trained_.optimizers

    def update(step: Any, loss: Tensor) -> None:
        optimizer.step()
        schedule.step(*([loss.item()] if name == "ReduceLROnPlateau" else []))

    return Case(trained_.model, optimizer, square, update, {"schedule": schedule})


for name in SCHEDULES:
    CASES[name] = lambda name=name: scheduled_by(name)


@case
def average_of_the_weights() -> Case:
    made = trained(perceptron())
    average = AveragedModel(made.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    def update(step: Any, loss: Tensor) -> None:
        made.update(step, loss)
        average.update_parameters(made.model)
        if step.is_last:  # so that the weights show the average
            with torch.no_grad():
                for mine, averaged in zip(made.model.parameters(), average.parameters(), strict=True):
                    mine.copy_(averaged)

    return Case(made.model, made.optimizers, made.loss, update, {"average": average})


# ---- forward passes


@case
def contrast_of_two_views() -> Case:
    def loss(network: nn.Module, batch: Batch) -> Tensor:
        one, other = (F.normalize(network(batch["x"] + 0.1 * torch.rand_like(batch["x"]))) for _ in range(2))
        return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))

    return trained(perceptron(), loss)


@case
def several_losses() -> Case:
    def loss(network: nn.Module, batch: Batch) -> Tensor:
        decay = sum(parameter.square().sum() for parameter in network.parameters())
        return square(network, batch) + network(batch["x"]).abs().mean() + 1e-3 * decay

    return trained(perceptron(), loss)


class Checkpointed(nn.Module):
    """Computes its inner part again in the backward pass, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Sometimes(nn.Module):
    """Uses a part of it for some batches only, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.always(x)
        return self.sometimes(hidden) if x.mean() > 0.5 else hidden


@case
def second_sum_that_uses_parts_on_some_micro_batches_only() -> Case:
    model = Sometimes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def update(step: Any, loss: Tensor) -> None:
        assert all((parameter.grad is None) == name.startswith("never") for name, parameter in model.named_parameters())
        optimizer.step()

    return Case(model, optimizer, square, lambda step, loss: None, more=[(square, update)])


class Language(nn.Module):
    """Tied embeddings, attention, a causal mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).triu(1))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(words), src_mask=self.mask))


@case
def part_that_is_called_by_itself() -> Case:
    """The rest is in no sum at all."""
    return trained(perceptron(), lambda model, batch: model[0](batch["x"]).square().mean())


@case
def tied_embeddings() -> Case:
    def loss(network: nn.Module, batch: Batch) -> Tensor:
        words = batch["words"]
        return F.cross_entropy(network(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    return trained(Language(), loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(2, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(len(x), -1, 2))[0][:, -1]


# ---- parameters and buffers


class Counting(nn.Module):
    """Integer, boolean and not persistent buffers, each of which decides numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("warm", torch.tensor(False))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x) * self.scale.clone() * (2 if self.warm else 1) / (1 + self.seen)
        if self.training:
            self.seen += 2
            self.warm |= True
            self.scale *= 0.5
        return outputs


def changed(change: Callable[[nn.Sequential], object]) -> Case:
    """The usual network after this change."""
    model = perceptron()
    change(model)
    return trained(model)


def of_format(dtype: torch.dtype) -> Case:
    return trained(perceptron().to(dtype), lambda network, batch: square(network, {**batch, "x": batch["x"].to(dtype)}))


CASES |= {
    "checkpointed_activations": lambda: trained(Checkpointed()),
    "parameters_used_on_some_micro_batches_only": lambda: trained(Sometimes()),
    "lstm": lambda: trained(Recurrent()),
    "weight_norm": lambda: changed(lambda model: parametrizations.weight_norm(model[0])),
    "spectral_norm": lambda: changed(lambda model: parametrizations.spectral_norm(model[0])),
    "frozen_part": lambda: changed(lambda model: model[:2].requires_grad_(False)),
    "float64_parameters": lambda: of_format(torch.float64),
    "bfloat16_parameters": lambda: of_format(torch.bfloat16),
    "integer_and_boolean_buffers": lambda: trained(Counting()),
    "cumulative_statistics": lambda: changed(lambda model: setattr(model[1], "momentum", None)),
}


# ---- cases that break the contract: the comparison has to see the first one, and the second one is refused


@case
def depends_on_the_rank() -> Case:
    return trained(perceptron(), lambda network, batch: square(network, batch) * (1 + int(os.environ.get("RANK", 0))))


@case
def ends_early_with_its_best_weights() -> Case:
    """The lowest loss is that of step 1; two steps later it is enough."""
    made = trained(perceptron())
    best, patience = sb.Best(made.model, higher=False), sb.Patience(2, higher=False)
    waited = [False]

    def update(step: Any, loss: Tensor) -> None:
        made.update(step, loss)
        value = abs(step.number - 1)
        best.update(value)
        waited[0] = patience.update(value)

    made.is_enough = lambda step: waited[0]
    return replace(made, update=update, state={"best": best, "patience": patience}, steps=8, ends=best.load)


@case
def library_average_of_the_weights() -> Case:
    made = trained(perceptron())
    average = sb.Average(made.model, 0.5)

    def update(step: Any, loss: Tensor) -> None:
        made.update(step, loss)
        average.update()
        with average.applied():
            step.log(weight=sum(p.abs().sum() for p in made.model.buffers()))

    return replace(made, update=update, state={"average": average}, ends=average.load)


@case
def rare_classes_drawn_more_often() -> Case:
    return replace(trained(perceptron()), order=sb.Weighted([1 + 9 * (index % 10 == 0) for index in range(200)]))


@case
def orders_otherwise_on_one_rank() -> Case:
    heavy = int(os.environ.get("RANK") == "1")
    return replace(trained(perceptron()), order=sb.Weighted([1 + 9 * (index % 10 == heavy) for index in range(200)]))


@case
def stops_on_one_rank() -> Case:
    return replace(trained(perceptron()), is_enough=lambda step: os.environ.get("RANK") == "1")


@case
def keeps_another_best_on_one_rank() -> Case:
    made = trained(perceptron())
    best = sb.Best(made.model, higher=True)

    def update(step: Any, loss: Tensor) -> None:
        made.update(step, loss)
        best.update(step.number if os.environ.get("RANK") == "1" else -step.number)

    return replace(made, update=update, state={"best": best})


@case
def iterates_once_more_on_one_rank() -> Case:
    made = trained(perceptron())
    made.more = [(square, made.update)] if os.environ.get("RANK") == "1" else []
    return made


# ---- plain attributes, and generators of one's own


class Remembering(nn.Module):
    """Each of its attributes decides numbers, and none lies in a state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.temperature, self.steps = 1.0, 0
        self.mean, self.scales = torch.zeros(()), np.ones(2)
        self.history: deque[float] = deque([1.0], maxlen=2)
        self.table: dict[str, Any] = {"rates": [1.0], "seen": {0}}
        self.shared = self.table["rates"]
        self.noise, self.draws = torch.Generator().manual_seed(3), [np.random.default_rng(3), random.Random(3)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) / self.temperature + 0.1 * torch.rand(WIDTH, generator=self.noise)
        if self.steps > 1:
            hidden = hidden.tanh()
        factor = sum(self.history) + float(self.mean) + float(self.scales[0]) + len(self.table["seen"])
        return self.head(hidden) * factor * self.shared[-1] + self.draws[0].random() - self.draws[1].random()

    def remember(self, loss: Tensor) -> None:
        """What a loop does after each step."""
        self.steps += 1
        self.temperature *= 0.5
        self.mean = 0.5 * self.mean + 0.5 * loss.float()
        self.scales *= 0.5
        self.history.append(loss.item())
        self.table["rates"].append(1 / self.steps)
        self.table["seen"].add(self.steps)


@case
def plain_attributes() -> Case:
    made = trained(Remembering())
    update = made.update
    return replace(made, update=lambda step, loss: (update(step, loss), made.model.remember(loss)))


@case
def alias_of_a_parameter() -> Case:
    """A list that holds a parameter, which is used through it."""
    model = Remembering()
    model.__dict__["tied"] = [model.layer.weight]

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        return square(network, batch) + F.linear(batch["x"], network.tied[0]).square().mean()

    return trained(model, loss)


class Counted(torch.optim.SGD):
    """An optimizer of one's own, which keeps its count, and a sum, beside its state."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count, self.rates = 0, [0.1]

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.rates.append(self.rates[-1] / self.count)
        for group in self.param_groups:
            group["lr"] = sum(self.rates)
        super().step()


@case
def own_optimizer_that_counts() -> Case:
    return own_optimizer(Counted)


class Normed(torch.optim.SGD):
    """It says so, and it is not: what it does depends on the shape."""

    elementwise = True

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad if parameter.ndim == 1 else parameter.grad / len(parameter)
        super().step()


def own_optimizer(kind: Any, **keys: Any) -> Case:
    model = perceptron()
    optimizer = kind(model.parameters(), **keys)
    return Case(model, optimizer, square, lambda step, loss: optimizer.step())


class Undeclared(torch.optim.SGD):
    """As torch's, which nobody can know."""


@case
def optimizer_with_a_hook() -> Case:
    made = own_optimizer(torch.optim.SGD, lr=0.1)

    def halve(optimizer: torch.optim.Optimizer, *call: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    made.optimizers.register_step_pre_hook(halve)
    return made


@case
def hook_on_a_gradient() -> Case:
    made = trained(perceptron())
    made.model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return made


@case
def norm_of_a_weight() -> Case:
    """A rate that follows a norm."""
    made = trained(perceptron())

    def update(step: Any, loss: Tensor) -> None:
        made.optimizers.param_groups[0]["lr"] = 0.01 * float(made.model[0].weight.norm().detach())
        made.optimizers.step()

    return replace(made, update=update)


CASES |= {
    "optimizer_that_is_not_declared": lambda: own_optimizer(Undeclared, lr=0.1),
    "optimizer_that_depends_on_the_shape": lambda: own_optimizer(Normed, lr=0.01),
}


class Drawing(Numbers):
    """Draws from generators of its own, one of which it makes with its first item."""

    def __init__(self) -> None:
        self.own: Any = [torch.Generator(), np.random.RandomState(3)]
        self.late: Any = None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.late = self.late or np.random.default_rng()
        item = super().__getitem__(index)
        return item | {
            "x": item["x"] + torch.rand(WIDTH, generator=self.own[0]) + self.own[1].rand() + self.late.random()
        }


@case
def dataset_with_generators_of_its_own() -> Case:
    return replace(trained(perceptron()), dataset=Drawing())


@case
def holds_another_attribute_on_one_rank() -> Case:
    made = trained(Remembering())

    def update(step: Any, loss: Tensor) -> None:
        made.update(step, loss)
        made.model.steps += int(os.environ.get("RANK", "0"))

    return replace(made, update=update)


BROKEN = "depends_on_the_rank"  # the one of these that does
