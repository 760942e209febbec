"""Nested state, as a `state_dict` gives it: its tensors by name, and the rest as JSON."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..errors import Refused
from .pieces import Held, Piece, Stored, whole

BUFFERS = "buffers"  # the name of the model's own entry


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold: a scheduler, an average of weights, a gradient scaler, an object of one's own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def pack(tree: Any, name: str, tensors: dict[str, Held]) -> Any:
    """`tree` as JSON-compatible values; its tensors go into `tensors`, under names that begin with `name`.

    Raises:
        Refused: it holds something that is neither a tensor nor a number, text or a container of such.
    """
    if isinstance(tree, Tensor | Piece):
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict) and all(isinstance(key, str | int) for key in tree):
        return {"dict": [[key, pack(value, f"{name}.{key}", tensors)] for key, value in tree.items()]}
    if type(tree) in (list, tuple):  # others, such as named tuples, would come back as these
        items = [pack(value, f"{name}.{place}", tensors) for place, value in enumerate(tree)]
        return {type(tree).__name__: items}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise Refused(
        f"{name}: a {type(tree).__name__} in its state, which no checkpoint holds: let state_dict() give tensors, "
        f"numbers, text, None, and dicts, lists and tuples of these"
    )


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, safe from the steps that follow; it shares no memory, which safetensors would refuse."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def unpack(packed: Any, tensors: Mapping[str, Tensor | Stored]) -> Any:
    """What `pack` was given; `realized` reads what is left to be read."""
    if not isinstance(packed, dict):
        return packed
    ((kind, held),) = packed.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: unpack(value, tensors) for key, value in held}
    items = [unpack(value, tensors) for value in held]
    return tuple(items) if kind == "tuple" else items


def realized(tree: Any) -> Any:
    """`tree` with tensors in place of those that are stored."""
    if isinstance(tree, Stored):
        return whole(tree)
    if isinstance(tree, dict):
        return {key: realized(value) for key, value in tree.items()}
    return type(tree)(map(realized, tree)) if type(tree) in (list, tuple) else tree


def require_stateful(objects: Mapping[str, Any]) -> Mapping[str, Stateful]:
    """`objects`, unless one of them has no state to save."""
    for name, held in objects.items():
        if not isinstance(held, Stateful) or name == BUFFERS:
            raise Refused(
                f"run.steps(state=...): {name} is a {type(held).__name__}; an object with state_dict() and "
                f"load_state_dict() wanted, under another name than {BUFFERS}"
            )
    return objects
