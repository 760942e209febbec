"""Weights that a loop keeps beside those of its model, and its patience: objects whose state checkpoints hold."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import UserError
from .shards import Held, Shard, extras, local, moved, weights
from .state import copy

if TYPE_CHECKING:
    from .loop import Loop


class LoopObject(ABC):
    """An object of the loop's own, to be named in `run.steps(state=...)`."""

    _loop: "Loop | None" = None

    def begin(self, loop: "Loop") -> None:
        """The steps begin, and checkpoints hold this from now on."""
        self._loop = loop

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""

    def _held(self) -> "Loop":
        """The loop whose checkpoints hold this.

        Raises:
            UserError: there is none, so that a resumed run would forget it.
        """
        if self._loop is None:
            name = type(self).__name__
            raise UserError(
                f"samebits.{name}: used, and no checkpoint holds it: give it to run.steps(..., state={{"
                f"'{name.lower()}': it}}) before"
            )
        return self._loop


class Patience(LoopObject):
    """Counts how often in a row a number was no better than its best.

        if patience.update(accuracy):
            run.stop("the accuracy has not risen in 5 evaluations")

    Attributes:
        best: the best number so far; None before the first.
        waited: how many have come since.
    """

    def __init__(self, limit: int, *, higher: bool, by: float = 0.0) -> None:
        """`higher` numbers are better, or else lower ones; better means by more than `by`."""
        if limit < 1 or not by >= 0:
            raise UserError(f"samebits.Patience({limit}, by={by}): a limit of at least 1 and by >= 0 wanted")
        self.limit, self.higher, self.by = limit, higher, float(by)
        self.best: float | None = None
        self.waited = 0

    def update(self, value: float | Tensor) -> bool:
        """Take in a number that is the same on all ranks; whether `limit` in a row were no better."""
        self._held()
        value = _number(self, value)
        if is_better(value, self.best, self.higher, self.by):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.limit

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.best, self.waited = state_dict["best"], state_dict["waited"]


class _Weights(LoopObject):
    """Keeps weights of a model; where those are sharded, each rank its part."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._weights: dict[str, Held] = {}

    @torch.no_grad()
    def load(self) -> None:
        """Give the model the weights that are kept: those that `run.finish` writes, where it comes next.

        Raises:
            UserError: none were kept yet.
        """
        self._held()
        if not self._weights:
            raise UserError(f"samebits.{type(self).__name__}.load(): nothing is kept yet: call update() first")
        for name, held in weights(self.model).items():
            local(held).copy_(local(self._weights[name]))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"weights": dict(self._weights)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        there = state_dict["weights"]
        like = weights(self.model) if there else {}
        self._weights = {name: self._part(there[name], held) for name, held in like.items()}

    def _part(self, tensor: Tensor, like: Held) -> Held:
        return like.of(like.cut(tensor).clone()) if isinstance(like, Shard) else tensor


class Best(_Weights):
    """Keeps the weights with which a number was best; they lie in the memory of the CPU.

        best.update(accuracy)  # after an evaluation, in the step
        ...
        best.load()  # after the loop; then run.finish

    Attributes:
        value: the best number so far; None before the first.
        step: how many steps were done then.
        loaded: how many were done when the model was given these weights; None before.
    """

    def __init__(self, model: nn.Module, *, higher: bool) -> None:
        """`higher` numbers are better, or else lower ones."""
        super().__init__(model)
        self.higher = higher
        self.value: float | None = None
        self.step = 0
        self.loaded: int | None = None
        self._extra: dict[str, Any] = {}

    @torch.no_grad()
    def update(self, value: float | Tensor) -> bool:
        """Take in a number of the model as it is, the same on all ranks; whether it is the best so far."""
        loop, value = self._held(), _number(self, value)
        if not is_better(value, self.value, self.higher):
            return False
        self.value, self.step = value, _done(loop)
        self._weights = {name: copy(held) for name, held in weights(self.model).items()}
        self._extra = deepcopy(extras(self.model))
        return True

    def load(self) -> None:
        """Give the model the best weights, and its modules their extra state of then: the result, if nothing follows.

        Raises:
            UserError: no number was best yet.
        """
        super().load()
        if self._extra:
            self.model.load_state_dict(self._extra, strict=False)
        self.loaded = _done(self._held())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {**super().state_dict(), "value": self.value, "step": self.step, "extra": self._extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state_dict)
        self.value, self.step, self._extra = (state_dict[name] for name in ("value", "step", "extra"))


class Average(_Weights):
    """An exponential moving average of the parameters, beside them on the device; buffers are those of the model.

        average.update()  # after optimizer.step()
        with average.applied():
            accuracy = ...
        ...
        average.load()  # after the loop; then run.finish

    It is computed by products and sums alone, which every CPU rounds alike.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """The average is decay * average + (1 - decay) * weights; it begins with the weights of the first update."""
        super().__init__(model)
        if not 0 <= decay < 1:
            raise UserError(f"samebits.Average(decay={decay}): at least 0 and less than 1 wanted")
        self.decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are."""
        self._held()
        now = weights(self.model)
        if not self._weights:
            self._weights = {
                name: held.of(local(held).clone()) if isinstance(held, Shard) else held.clone()
                for name, held in now.items()
            }
            return
        averaged = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, held in now.items():
            kept, new = local(self._weights[name]), local(held)
            if name in averaged and kept.is_floating_point():
                kept.mul_(self.decay).add_(new * (1 - self.decay))
            else:
                kept.copy_(new)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average, and in the end its own weights back."""
        own = {name: local(held).clone() for name, held in weights(self.model).items()}
        self.load()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, held in weights(self.model).items():
                    local(held).copy_(own[name])

    def _part(self, tensor: Tensor, like: Held) -> Held:
        return moved(super()._part(tensor, like), local(like).device)


def _done(loop: "Loop") -> int:
    """How many steps are done, with the one under way."""
    return loop.step.number + 1 if loop.step else loop.done


def is_better(value: float, than: float | None, higher: bool, by: float = 0.0) -> bool:
    """Whether a number is better than another one, by more than `by`; a NaN is better than none."""
    if value != value:
        return False
    return than is None or (value > than + by if higher else value < than - by)


def _number(kept: LoopObject, value: float | Tensor) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # torch warns of a graph
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"samebits.{type(kept).__name__}.update({value!r}): one number wanted") from None
