"""The updates of a run: by the one optimizer that checkpoints hold, and each with the gradients of its step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import Refused


class Updates:
    """Watches all optimizers until `end`.

    Attributes:
        ready: whether the gradients of the step under way are in place.
        made: whether the optimizer has used them.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, objects: Mapping[str, object], device: torch.device
    ) -> None:
        _require_fit(model, optimizer, device)
        _require_saved_schedule(optimizer, objects)
        self._model, self._optimizer = model, optimizer
        self.begin()
        self._watch = register_optimizer_step_pre_hook(self._check)

    def begin(self) -> None:
        """A step begins."""
        self.ready = self.made = False

    def end(self) -> None:
        """The last step is done: from here on nothing is watched."""
        self._watch.remove()

    @property
    def forgotten(self) -> bool:
        """Whether there are gradients that nothing has used."""
        return self.ready and not self.made and any(p.grad is not None for p in self._model.parameters())

    def _check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = _held(optimizer)
        if optimizer is not self._optimizer:
            if len(_foreign(self._model, optimizer)) < len(held):
                raise Refused(
                    "optimizer.step(): this optimizer is not the one that run.steps() was given; no checkpoint would "
                    "hold its state. Give all parameters to one optimizer, in groups"
                )
            return
        if not self.ready or all(parameter.grad is None for parameter in held):
            raise Refused(
                "optimizer.step() came without gradients: call step.backward(...) before it, in each step. "
                "optimizer.zero_grad() is not needed"
            )
        self.made = True


def _require_fit(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    elsewhere = sorted({str(p.device) for p in model.parameters() if p.device != device})
    if elsewhere:
        raise Refused(
            f"the model lies on {', '.join(elsewhere)}, the run is on {device}: call model.to(run.world.device) before "
            f"you make the optimizer"
        )
    foreign = _foreign(model, optimizer)
    if foreign:
        raise Refused(
            f"the optimizer holds {len(foreign)} parameters that are not the model's, the first of shape "
            f"{tuple(foreign[0].shape)}: give run.steps() the model whose parameters the optimizer was given"
        )


def _require_saved_schedule(optimizer: torch.optim.Optimizer, objects: Mapping[str, object]) -> None:
    schedules = [held for held in objects.values() if isinstance(held, LRScheduler)]
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False) and not schedules:
        raise Refused(
            "a torch scheduler counts the steps of this optimizer, and no checkpoint holds its count: a resumed run "
            "would differ. Give it to run.steps(..., state={'schedule': it}), or compute the rate from step.number"
        )


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _foreign(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    known = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in _held(optimizer) if id(parameter) not in known]
