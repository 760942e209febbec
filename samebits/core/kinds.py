"""Kinds of objects that attributes hold, and that a checkpoint can hold: as JSON and a tensor, and back."""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from .trees import FACTORIES, MAPPINGS


class Kind(NamedTuple):
    """A kind of object that can be filled anew.

    Attributes:
        types: exactly these.
        take: what is in it; `refer` gives a reference in place of an object inside.
        make: another one, of the same form and perhaps its tensor.
        fill: the inverse of `take`, of an object, what was taken, what gives an object for a reference, and its tensor.
    """

    types: tuple[type, ...]
    take: Callable[[Any, Callable[[Any, str], Any]], Any]
    make: Callable[[Any, Any], Any]
    fill: Callable[[Any, Any, Callable[[Any], Any], Any], object]


def _items(held: Any, refer: Callable[[Any, str], Any]) -> list[Any]:
    return [refer(each, f"[{place}]") for place, each in enumerate(held)]


def _members(held: Any, refer: Callable[[Any, str], Any]) -> list[Any]:
    return sorted(_items(held, refer), key=json.dumps)  # a set has no order


def _pairs(held: Any, refer: Callable[[Any, str], Any]) -> list[Any]:
    return [[refer(key, f".key({key!r})"), refer(value, f"[{key!r}]")] for key, value in held.items()]


def _refill(held: Any, items: list[Any], resolve: Callable[[Any], Any], tensor: Any = None) -> None:
    held.clear()
    (held.update if isinstance(held, set) else held.extend)(map(resolve, items))


def _refill_pairs(held: Any, pairs: list[Any], resolve: Callable[[Any], Any], tensor: Any = None) -> None:
    held.clear()
    for key, value in pairs:
        held[resolve(key)] = resolve(value)


def _refill_tensor(held: Tensor, form: Mapping[str, Any], resolve: Callable[[Any], Any], tensor: Tensor) -> None:
    with torch.no_grad():
        if (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            held.copy_(tensor)
        else:
            held.data = tensor.to(held.device)
    held.requires_grad_(form["grad"])


def _refill_array(held: Any, form: Any, resolve: Callable[[Any], Any], tensor: Tensor) -> None:
    held[...] = tensor.numpy()


def _form(held: Any) -> dict[str, Any]:
    return {"dtype": str(held.dtype), "shape": list(held.shape)}


KINDS: dict[str, Kind] = {
    "list": Kind((list,), _items, lambda form, tensor: [], _refill),
    "set": Kind((set,), _members, lambda form, tensor: set(), _refill),
    "deque": Kind(
        (deque,),
        lambda held, refer: [held.maxlen, _items(held, refer)],
        lambda form, tensor: deque(maxlen=form[0]),
        lambda held, form, resolve, tensor: _refill(held, form[1], resolve),
    ),
    **{
        name: Kind((kind,), _pairs, lambda form, tensor, kind=kind: kind(), _refill_pairs)  # type: ignore[misc]
        for name, kind in MAPPINGS.items()
    },
    "defaultdict": Kind(
        (defaultdict,),
        lambda held, refer: [held.default_factory.__name__, _pairs(held, refer)],
        lambda form, tensor: defaultdict(FACTORIES[form[0]]),
        lambda held, form, resolve, tensor: _refill_pairs(held, form[1], resolve),
    ),
    "tensor": Kind(
        (Tensor, nn.Parameter),
        lambda held, refer: (
            _form(held)
            | {"device": held.device.type, "grad": held.requires_grad, "parameter": type(held) is nn.Parameter}
        ),
        lambda form, tensor: (nn.Parameter if form["parameter"] else torch.as_tensor)(tensor.to(form["device"])),
        _refill_tensor,
    ),
    "array": Kind(
        (numpy.ndarray,),
        lambda held, refer: _form(held),
        lambda form, tensor: tensor.numpy(),
        _refill_array,
    ),
}

# Values that cannot change: their types, as JSON, and back.
VALUES: dict[str, tuple[tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": ((int,), hex, lambda text: int(text, 16)),
    "float": ((float,), float.hex, float.fromhex),
    "complex": (
        (complex,),
        lambda value: [value.real.hex(), value.imag.hex()],
        lambda two: complex(*map(float.fromhex, two)),
    ),
    "bytes": ((bytes,), bytes.hex, bytes.fromhex),
    "dtype": ((torch.dtype,), str, lambda text: getattr(torch, text.removeprefix("torch."))),
    "device": ((torch.device,), str, torch.device),
    "size": ((torch.Size,), list, torch.Size),
    "range": ((range,), lambda value: [value.start, value.stop, value.step], lambda three: range(*three)),
    "numpy": (
        tuple({numpy.dtype(name).type for name in ("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d")}),
        lambda value: [value.dtype.name, value.tobytes().hex()],
        lambda two: numpy.frombuffer(bytes.fromhex(two[1]), numpy.dtype(two[0]))[0],
    ),
}
KIND_OF = {each: name for name, kind in KINDS.items() for each in kind.types}
VALUE_OF = {each: name for name, (types, _, _) in VALUES.items() for each in types}
