"""Nested state, as a `state_dict` gives it: its tensors by name, and the rest as JSON.

What is packed comes back as it was: types of containers, of keys and of numbers, and the last bit of each. Tensors come
back as plain ones on the CPU, one for each place, without a gradient.
"""

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import UserError
from .shards import Held, Shard, Stored, unsharded

MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict)}  # of a defaultdict


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold: a scheduler, an average of weights, a gradient scaler, an object of one's own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def pack(tree: Any, name: str, tensors: dict[str, Held]) -> Any:
    """`tree` as JSON-compatible values; its tensors go into `tensors`, under names that begin with `name`.

    A name ends with the way to the tensor, as Python would write it: no two ways read alike.

    Raises:
        UserError: it holds something that would not come back as it is.
    """
    kind = type(tree)
    if isinstance(tree, Shard) or (isinstance(tree, Tensor) and is_plain(tree)):
        tensors[name] = tree
        return {"tensor": name}
    if _is_mapping(tree):
        pairs = [[_number(key), pack(value, f"{name}[{key!r}]", tensors)] for key, value in tree.items()]
        return {kind.__name__: [tree.default_factory.__name__, pairs] if kind is defaultdict else pairs}
    if kind in (list, tuple):  # others, such as named tuples, would come back as these
        return {kind.__name__: [pack(value, f"{name}[{place}]", tensors) for place, value in enumerate(tree)]}
    if tree is None or kind in (bool, int, float, str):
        return _number(tree)
    if isinstance(tree, numpy.generic) and tree.dtype.kind in "biuf" and tree.itemsize <= 8:
        return {"numpy": [tree.dtype.name, tree.item()]}
    raise UserError(
        f"{name}: a {kind.__name__}{details(tree)} in its state, which no checkpoint holds: let state_dict() give "
        f"tensors, numbers, text, None, and dicts, lists and tuples of these; keys are text or whole numbers"
    )


def _is_mapping(tree: Any) -> bool:
    kind = type(tree)
    known = kind in MAPPINGS.values() or (kind is defaultdict and tree.default_factory in FACTORIES.values())
    return known and all(key is None or type(key) in (str, int, bool) for key in tree)


def _number(value: Any) -> Any:
    """A value as JSON holds it: a whole number that others might round, or refuse, as text."""
    return {"int": hex(value)} if type(value) is int and value.bit_length() > 63 else value


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor has torch's own class and `is_storable`."""
    return type(tensor) in (Tensor, nn.Parameter) and is_storable(tensor)


def is_storable(tensor: Tensor) -> bool:
    """Return True if the elements lie in memory, each for itself, and safetensors has their format."""
    is_wrapper = is_traceable_wrapper_subclass(tensor)  # of other tensors, which hold the elements
    return tensor.layout == torch.strided and not tensor.is_meta and not is_wrapper and _is_stored(tensor.dtype)


@cache
def _is_stored(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(1, dtype=dtype)})
    except (KeyError, RuntimeError, NotImplementedError):
        return False
    return True


def details(tree: Any) -> str:
    """Return more words on a value that is refused, such as a tensor's dtype and layout, or nothing."""
    if isinstance(tree, Tensor):
        return f" ({tree.dtype}, {tree.layout}, {tree.device})"
    if isinstance(tree, dict):
        return f" with the keys {', '.join(map(repr, list(tree)[:3]))}"
    return ""


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, safe from the steps that follow; it shares no memory, which safetensors would refuse."""
    return tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()


def unpack(packed: Any, tensors: Mapping[str, Tensor | Stored]) -> Any:
    """What `pack` was given; `realized` reads what is left to be read."""
    if not isinstance(packed, dict):
        return packed
    ((kind, held),) = packed.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "int":
        return int(held, 16)
    if kind == "numpy":
        return numpy.dtype(held[0]).type(held[1])
    made: Any = MAPPINGS[kind]() if kind in MAPPINGS else None
    if kind == "defaultdict":
        made, held = defaultdict(FACTORIES[held[0]]), held[1]
    if made is None:
        items = [unpack(value, tensors) for value in held]
        return tuple(items) if kind == "tuple" else items
    for key, value in held:
        made[unpack(key, tensors)] = unpack(value, tensors)
    return made


def leaves(packed: Any, name: str) -> Iterator[tuple[str, str]]:
    """The containers and values of what `pack` gave, but for tensors, each with its place; mappings in any order."""
    kind, held = next(iter(packed.items())) if isinstance(packed, dict) else ("", packed)
    if kind in ("list", "tuple"):
        inner = list(enumerate(held))
    elif kind in MAPPINGS or kind == "defaultdict":
        inner = [(unpack(key, {}), value) for key, value in (held[1] if kind == "defaultdict" else held)]
    else:
        if kind != "tensor":  # those are compared by their digests
            yield name, json.dumps(packed)
        return
    yield name, kind
    for key, value in inner:
        yield from leaves(value, f"{name}[{key!r}]")


def realized(tree: Any) -> Any:
    """`tree` with tensors in place of those that are stored."""
    if isinstance(tree, Stored):
        return unsharded(tree)
    if isinstance(tree, dict):
        made = copy(tree)  # of its kind
        for key, value in tree.items():
            made[key] = realized(value)
        return made
    return type(tree)(map(realized, tree)) if type(tree) in (list, tuple) else tree


def require_stateful(objects: Mapping[str, Any]) -> Mapping[str, Stateful]:
    """`objects`, unless one of them has no state to save."""
    for name, held in objects.items():
        if not isinstance(held, Stateful):
            raise UserError(
                f"run.steps(state=...): {name} is a {type(held).__name__}; an object with state_dict() and "
                f"load_state_dict() wanted"
            )
    return objects
