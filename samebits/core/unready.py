"""Stand-ins for gradients inside the loop over a step's micro-batches, where none is complete.

A line there that clips gradients or adds noise to them finds `.grad` empty on most ranks, and does nothing without a
word. Whatever is done with a stand-in is refused, and so is a gradient that the loop puts in its place.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import UserError
from .guard import OWN_BACKWARD

TOO_EARLY = (
    "its gradient is used inside `for batch in step:`, where it is not complete, so the line would have no effect. "
    "Move the line behind that loop, before optimizer.step()"
)


class _Unready(Tensor):
    """A tensor without memory, of which nothing can be read."""

    label: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse a line of the owner's.

        Raises:
            UserError: always.
        """
        raise UserError(f"{_label([*args, *(kwargs or {}).values()]) or 'a parameter'}: {TOO_EARLY}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse what autograd adds: only it comes here past `__torch_function__`.

        Raises:
            UserError: always.
        """
        raise UserError(OWN_BACKWARD)


def _label(values: Iterable[Any]) -> str:
    """Return the name that the first stand-in among the arguments has; "" if there is none."""
    for value in values:
        if isinstance(value, _Unready):
            return str(object.__getattribute__(value, "label"))
        if isinstance(value, list | tuple) and (label := _label(value)):
            return label
    return ""


class Unready:
    """Puts stand-ins into `.grad` of some tensors, and takes them out again."""

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        """`names` has the names of parameters, or of what an optimizer updates in their stead."""
        self._names = names
        self._stand_ins: dict[Tensor, Tensor] = {}

    def put(self) -> None:
        """Let all gradients be stand-ins; there is no gradient now."""
        if not self._stand_ins:
            self._stand_ins = {tensor: _stand_in(tensor, name) for tensor, name in self._names.items()}
        for tensor, stand_in in self._stand_ins.items():
            tensor.grad = stand_in

    def take(self) -> None:
        """Let there be no gradients.

        Raises:
            UserError: the loop has put a gradient of its own there.
        """
        for tensor, stand_in in self._stand_ins.items():
            gradient, tensor.grad = tensor.grad, None
            if gradient is not None and gradient is not stand_in:
                raise UserError(f"{self._names[tensor]}: {TOO_EARLY}")


def _stand_in(tensor: Tensor, name: str) -> Tensor:
    stand_in: Tensor = torch.Tensor._make_wrapper_subclass(
        _Unready, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    object.__setattr__(stand_in, "label", name)
    return stand_in
