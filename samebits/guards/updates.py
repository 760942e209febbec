"""The updates of a run: by the optimizers that checkpoints hold, and each with the gradients of its step."""

import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core.errors import UserError
from ..core.observer import Ballot, Observer, View
from ..core.state import State
from .holders import require_saved

SCALER = str(Path("torch", "amp", "grad_scaler.py"))
NEAR = 10  # calls, from a scaler to its optimizer's hook


def _callers() -> Iterator[str]:
    """The files of the functions that have called this one, the nearest first."""
    frame = sys._getframe(1)
    for _ in range(NEAR):
        if (frame := frame.f_back) is None:  # type: ignore[assignment]
            return
        yield frame.f_code.co_filename


class Updates(Observer):
    """Watches all optimizers of this process until it is closed.

    Attributes:
        ready: whether the gradients of the step's last sum are in place.
        made: the optimizers of the run that have used them.
        skipped: whether they were not finite, so that an optimizer has nothing to do.
    """

    name = "updates"

    def __init__(self, state: State) -> None:
        require_saved(state.optimizers, state.objects)
        self._model, self._optimizers = state.model, state.optimizers
        self._given = [weakref.ref(parameter) for parameter in state.model.parameters()]
        self.ready = self.skipped = False
        self.made: list[torch.optim.Optimizer] = []
        self._under_way: list[torch.optim.Optimizer] = []  # one twice, where its step() calls that of its base class
        self.first = 0  # the step with which the run begins
        self._watches = (
            register_optimizer_step_pre_hook(self._check),
            register_optimizer_step_post_hook(self._end),
        )

    def begin_step(self, view: View) -> None:
        """No gradient is there yet."""
        self.ready = False
        self.made, self._under_way = [], []

    def batch(self, view: View) -> None:
        """A sum has begun: its gradients are not there yet."""
        self.begin_step(view)

    def gradients(self, view: View) -> None:
        """An optimizer may use them now."""
        self.ready, self.skipped = True, view.skipped

    def ballot(self, view: View) -> Ballot:
        """Refuse a first step that ends without an update."""
        if view.step == self.first and self.forgotten:
            raise UserError(
                f"step {view.step}: optimizer.step() was never called; call it after the loop over the step. Where a "
                "step is to leave the weights alone, drop the gradients: optimizer.zero_grad()"
            )
        return Ballot()

    def close(self, error: BaseException | None) -> None:
        """From here on nothing is watched."""
        for watch in self._watches:
            watch.remove()

    @property
    def forgotten(self) -> bool:
        """Whether there are gradients that nothing has used."""
        return self.ready and not self.made and any(p.grad is not None for p in self._optimizers.parameters)

    def _check(self, optimizer: torch.optim.Optimizer, words: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if optimizer not in self._optimizers.all:
            given = (reference() for reference in self._given)
            ours = {id(parameter) for parameter in (*self._model.parameters(), *given) if parameter is not None}
            if any(id(parameter) in ours for parameter in held):
                raise UserError(
                    "optimizer.step(): this optimizer is not among those that run.steps() was given; no checkpoint "
                    "would hold its state. Give run.steps() all of them: run.steps(model, [one, another], ...)"
                )
            return
        if any(file.endswith(SCALER) for file in _callers()):
            raise UserError(
                "scaler.step(optimizer): a gradient scaler belongs to float16, and its factor follows overflows. Set "
                "compute.precision: bfloat16, which needs none, and call optimizer.step()"
            )
        if any(closure is not None for closure in (*words[1:2], named.get("closure"))):
            raise UserError(
                "optimizer.step(closure): a closure makes backward passes of its own, whose gradients no rank sums. "
                "Call optimizer.step() after the loop over the step"
            )
        if not self.ready or (not self.skipped and all(parameter.grad is None for parameter in held)):
            raise UserError(
                "optimizer.step() came without gradients: call it after the loop over the step, which sums them. "
                "optimizer.zero_grad() is not needed"
            )
        if optimizer in self.made and optimizer not in self._under_way:
            raise UserError(
                "optimizer.step() was called twice with the same gradients: call it once after each loop over the step"
            )
        self.made.append(optimizer)
        self._under_way.append(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer, words: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if optimizer in self._under_way:
            self._under_way.remove(optimizer)
