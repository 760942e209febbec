"""Objects that change an optimizer, whoever wrote them, are found by what refers to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel

from samebits.core.errors import UserError
from samebits.core.optimizers import Optimizers
from samebits.guards.holders import require_saved


class Own:
    """A schedule of one's own, which holds `target`."""

    def __init__(self, target: object) -> None:
        self.target, self.count = target, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Slotted(Own):
    __slots__ = ("count", "target")


class Wrapper(Own):
    """What libraries lay around an optimizer: it has no state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return self.target.state_dict()  # type: ignore[attr-defined,no-any-return]


class Trainer(nn.Module):
    """A module that holds model and optimizer, without state of its own."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.model, self.optimizer, self.many = model, optimizer, [optimizer]


def left_over(optimizer: Optimizer) -> None:
    held = Own(optimizer)
    held.self = held  # type: ignore[attr-defined]


def sequence(optimizer: Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [ConstantLR(optimizer), SWALR(optimizer, 0.1)], milestones=[2])


Make = Callable[[Optimizer], Any]
FOUND: dict[str, Make] = {
    "ReduceLROnPlateau": ReduceLROnPlateau,
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    "SequentialLR": sequence,
    "Own": Own,
    "Own of groups": lambda optimizer: Own(optimizer.param_groups),
    "Own of a group": lambda optimizer: Own(optimizer.param_groups[0]),
    "Own of a list": lambda optimizer: Own([optimizer]),
    "Own of lists": lambda optimizer: Own({"all": (optimizer,)}),
    "Slotted": Slotted,
}
NOT_FOUND: dict[str, Make] = {
    "a wrapper": Wrapper,
    "a module": lambda optimizer: Trainer(nn.Linear(1, 1), optimizer),
    "an average": lambda optimizer: AveragedModel(nn.Linear(1, 1)),
    "a scaler": lambda optimizer: torch.amp.GradScaler("cpu"),
    "a function": lambda optimizer: lambda: optimizer.step(),
    "what is left over": left_over,
    "a dict": lambda optimizer: {"optimizer": optimizer},
    "nothing": lambda optimizer: None,
}


@pytest.fixture
def optimizers() -> Optimizers:
    model = nn.Linear(2, 2)
    return Optimizers([torch.optim.SGD([model.weight]), torch.optim.AdamW([model.bias], fused=True)], model)


@pytest.mark.parametrize("kind", FOUND)
def test_object_that_holds_an_optimizer_is_saved_or_refused_by_name(kind: str, optimizers: Optimizers):
    rates = FOUND[kind](optimizers.all[len(kind) % 2])
    message = rf"^a {kind.split()[0]} refers to the optimizer, and no .* state=\{{'rates': rates\}}\), or compute"
    with pytest.raises(UserError, match=message):
        require_saved(optimizers, {"other": Own(None)})
    require_saved(optimizers, {"mine": rates})
    require_saved(optimizers, {"mine": Own([rates])})


@pytest.mark.parametrize("kind", NOT_FOUND)
def test_object_that_changes_no_optimizer_is_not_refused(kind: str, optimizers: Optimizers):
    other = NOT_FOUND[kind](optimizers.all[0])
    require_saved(optimizers, {})
    del other
