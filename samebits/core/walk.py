"""Attributes as they are at a moment: references to objects, and objects as what they hold."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .digest import tensor_digest
from .generators import OWN
from .kinds import KIND_OF, KINDS, VALUE_OF, VALUES
from .trees import FACTORIES, is_plain

LARGEST, MOST = 64 << 20, 100_000  # bytes of a tensor or an array that is saved, and items of a container
STATEFUL = *OWN, nn.Module, torch.optim.Optimizer


@dataclass
class Look:
    """Attributes as they are at a moment.

    Attributes:
        kinds: the class of each module, by name.
        roots: what each attribute refers to, by name.
        objects: kind and content of all that can be changed, each under the way to it.
        tensors: what of it is a tensor.
        held: the objects; so none is freed, and its id is nobody else's.
        of: the attribute through which each was found.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    roots: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, list[Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """All as text that can be compared, tensors by their digests; by the way, after an attribute's name."""
        digests = {way: tensor_digest(tensor).item() for way, tensor in self.tensors.items()}
        roots = {f"{name} =": json.dumps(reference) for name, reference in self.roots.items()}
        return roots | {way: json.dumps([each, digests.get(way)]) for way, each in self.objects.items()}

    def name_of(self, way: str) -> str:
        """The attribute that a key of `texts` belongs to."""
        return self.of.get(way, way.removesuffix(" ="))


class Walk:
    """Makes a `Look`, from one attribute to the next."""

    def __init__(self, parts: Mapping[int, tuple[Any, str]], born: Mapping[int, str], later: bool) -> None:
        """`parts` are modules, parameters and buffers with their names, `born` what attributes held, by id."""
        self._parts, self._born, self._later = parts, born, later
        self._ways: dict[int, str] = {}
        self._storages = {
            address: name
            for held, name in parts.values()
            if isinstance(held, Tensor) and not isinstance(held, DTensor) and (address := _address(held))
        }
        self._seen: set[int] = set()
        self.look, self.root = Look(), ""

    def refer(self, held: Any, way: str) -> Any:
        """A reference to an object, which is looked at once."""
        kind = type(held)
        if held is None or kind in (bool, str):
            return held
        if kind in VALUE_OF:
            name = VALUE_OF[kind]
            return {name: VALUES[name][1](held)}
        if kind is tuple:
            return {"tuple": [self.refer(each, f"{way}[{place}]") for place, each in enumerate(held)]}
        if id(held) in self._parts:
            return {"part": self._parts[id(held)][1]}
        if id(held) not in self._ways:
            place = self._born.get(id(held)) or (f"{way} (new)" if self._later else way)
            self._ways[id(held)] = place
            self.look.held[place], self.look.of[place] = held, self.root
            self.look.objects[place] = self._content(held, place)
        return {"object": self._ways[id(held)]}

    def _content(self, held: Any, way: str) -> list[Any]:
        kind = KIND_OF.get(type(held), "opaque")
        if kind == "defaultdict" and held.default_factory not in FACTORIES.values():
            kind = "opaque"
        if kind == "tensor":
            return self._tensor(held, way)
        if kind == "array":
            return self._array(held, way)
        if kind in KINDS and len(held) > MOST:
            some = islice(held.values() if isinstance(held, dict) else held, 0, None, 1 + len(held) // MOST)
            return ["large", f"{kind} of {len(held)} items, more than {MOST}", hash((*map(id, some),))]
        if kind == "opaque":
            return ["stateful" if isinstance(held, STATEFUL) else kind, type(held).__name__]
        return [kind, KINDS[kind].take(held, lambda inner, more: self.refer(inner, way + more))]

    def _tensor(self, held: Tensor, way: str) -> list[Any]:
        if not is_plain(held):
            return ["opaque", type(held).__name__]
        if held.nbytes > LARGEST:
            return ["large", _size(held), 0 if held.is_inference() else held._version]
        if held.grad_fn is not None:
            self.look.tensors[way] = held.detach()
            return ["graph", "tensor with a graph"]
        address = _address(held)
        if address in self._storages:
            form = [*held.shape], [*held.stride()], held.storage_offset()
            return ["view", [{"part": self._storages[address]}, *form]]
        if address in self._seen and way.endswith("(new)"):
            return ["opaque", "view of another attribute"]
        if address:
            self._seen.add(address)
        self.look.tensors[way] = held.detach()
        return ["tensor", KINDS["tensor"].take(held, self.refer)]

    def _array(self, held: Any, way: str) -> list[Any]:
        if held.dtype.hasobject:
            return ["opaque", f"ndarray of {held.dtype}"]
        if held.nbytes > LARGEST:
            some = numpy.ascontiguousarray(held.reshape(-1)[:: 1 + held.nbytes // LARGEST])
            return ["large", _size(held), zlib.crc32(some.view(numpy.uint8).data)]
        try:
            self.look.tensors[way] = torch.from_numpy(held.copy())
        except TypeError:  # such as an array of text
            return ["opaque", f"ndarray of {held.dtype}"]
        return ["array", KINDS["array"].take(held, self.refer)]


def _size(held: Any) -> str:
    return f"{type(held).__name__} of {held.nbytes >> 20} MiB, more than {LARGEST >> 20}"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
