"""Plain attributes of modules and of an own optimizer: state that lies in no `state_dict`.

    model.temperature *= 0.9              # a number that the loop changes
    self.history = deque(maxlen=10)       # a container, a tensor, an array
    self.tied = [self.embedding.weight]   # an alias, which stays one

They are looked at as references to objects, and objects as what they hold. What differs from the beginning of the loop
is saved. A resumed run makes its beginning anew: objects of then are filled in place, so whatever refers to them goes
on to do so; others are made.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .digest import tensor_digest
from .errors import UserError
from .trees import FACTORIES, MAPPINGS, is_plain

LARGEST, MOST = 64 << 20, 100_000  # bytes of a tensor or an array that is saved, and items of a container
RECURRENT = {"_flat_weights", "_flat_weight_refs"}  # parameters once more, which torch's recurrent layers look after
OF_MODULES = set(vars(nn.Module())) | RECURRENT
OF_OPTIMIZERS = set(vars(torch.optim.Optimizer([torch.zeros(1)], {})))
UNSAVED = "graph", "large", "opaque"  # kinds of objects that no checkpoint can hold


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
KIND_OF = {each: name for name, kind in KINDS.items() for each in kind.types}


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


class Attributes:
    """The attributes of some modules and optimizers, by name, and how they were at the beginning.

    Generators of then have no state to save, for the loop seeds them.

    Attributes:
        roots: the modules and optimizers.
        unsaved: names of attributes on which no bit depends.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        own = {name: each for name, each in optimizers.items() if not type(each).__module__.startswith("torch.optim")}
        self._modules, self._optimizers = modules, own
        self.roots = *modules.values(), *own.values()
        self.begin()

    def begin(self, unsaved: Collection[str] = ()) -> None:
        """What differs from now on is saved, but for `unsaved` attributes."""
        self.unsaved = unsaved
        self._born: dict[int, str] = {}
        self._later = False
        self._first = self.look()
        self._later = True
        self._born = {id(each): way for way, each in self._first.held.items()}
        self._texts = self._first.texts()

    def aliases(self) -> dict[str, str]:
        """The attributes that are, or share memory with, a parameter or a buffer; whose name."""
        now = self.look()
        found = [(name, each) for name, root in now.roots.items() for each in _references([root])]
        found += [(way, each) for way, (_, form) in now.objects.items() for each in _references(form)]
        return {now.name_of(way): each["weight"] for way, each in found if "weight" in each}

    def look(self) -> Look:
        """The attributes as they are now."""
        walk = _Walk(self._weights(), self._born, self._later)
        for prefix, holder, own in self._holders():
            walk.look.kinds[prefix] = type(holder).__name__
            for key, held in sorted(vars(holder).items(), key=lambda each: str(each[0])):
                name = f"{prefix}.{key}"
                if key not in own and isinstance(key, str) and not self._is_unsaved(name):
                    walk.root = name
                    walk.look.roots[name] = walk.refer(held, name)
        return walk.look

    def changed(self) -> dict[str, tuple[str, str]]:
        """What differs from the beginning, by the way to it: the attribute's name and the value as text."""
        now = self.look()
        return {way: (now.name_of(way), text) for way, text in now.texts().items() if text != self._texts.get(way)}

    def saved(self) -> dict[str, Any]:
        """What differs from the beginning, for `trees.pack`; nothing where nothing does.

        Raises:
            UserError: it cannot be saved.
        """
        now = self.look()
        texts, kinds, first_kinds = now.texts(), now.kinds, self._first.kinds
        if odd := sorted(name for name in kinds | first_kinds if kinds.get(name) != first_kinds.get(name)):
            seen, before = (each.get(odd[0], "no module") for each in (kinds, first_kinds))
            raise UserError(
                f"{odd[0]} is {seen}, and was {before} at the beginning: no checkpoint holds which modules a model "
                f"has. Make all before run.steps, and choose one in forward"
            )
        changed = [way for way in now.objects if texts[way] != self._texts.get(way)]
        ways = {name: each["object"] for name, each in now.roots.items() if isinstance(each, dict) and "object" in each}
        graphs = {name: way for name, way in ways.items() if now.objects[way][0] == "graph"}  # gone with their step
        inner = set(graphs.values())
        if lost := [way for way in changed if now.objects[way][0] in UNSAVED and way not in inner]:
            self._refuse(now, lost[0])
        first = self._first.roots
        roots = {name: [each] for name, each in now.roots.items() if name not in graphs and each != first.get(name)}
        roots |= {name: [] for name in first if name not in now.roots}
        objects = {way: now.objects[way] for way in changed if way not in inner}
        if not roots and not objects:
            return {}
        tensors = {way: now.tensors[way] for way in objects if way in now.tensors}
        return {"roots": json.dumps(roots, sort_keys=True), "objects": json.dumps(objects), "tensors": tensors}

    def put(self, saved: Mapping[str, Any]) -> None:
        """Give the attributes of a fresh beginning what `saved` gave.

        Raises:
            UserError: the beginning was another one.
        """
        roots, objects = (json.loads(saved.get(name, "{}")) for name in ("roots", "objects"))
        tensors = saved.get("tensors", {})
        weights = {name: held for held, name in self._weights().values()}
        made = dict(self._first.held)
        for way, (kind, form) in objects.items():
            if kind == "view":
                made[way] = weights[form[0]["weight"]].detach().as_strided(*form[1:])
            elif way not in made:
                made[way] = KINDS[kind].make(form, tensors.get(way))

        def resolve(reference: Any) -> Any:
            if not isinstance(reference, dict):
                return reference
            ((kind, inner),) = reference.items()
            if kind in VALUES:
                return VALUES[kind][2](inner)
            if kind == "tuple":
                return tuple(map(resolve, inner))
            place = weights if kind == "weight" else made
            if inner not in place:
                raise UserError(
                    f"the checkpoint refers to {inner}, which was there at the beginning, and is not here: build the "
                    f"model that the run began with, or begin in another folder with --out"
                )
            return place[inner]

        for way, (kind, form) in objects.items():
            if kind != "view":
                KINDS[kind].fill(made[way], form, resolve, tensors.get(way))
        holders = {prefix: vars(holder) for prefix, holder, _ in self._holders()}
        first = {name: [each] for name, each in self._first.roots.items()}
        for name, given in ({name: [] for name in self.look().roots} | first | roots).items():  # else as they began
            prefix, _, key = name.rpartition(".")
            if given:
                holders[prefix][key] = resolve(given[0])
            else:
                holders[prefix].pop(key, None)

    def _refuse(self, now: Look, way: str) -> None:
        name, (kind, form) = now.name_of(way), now.objects[way]
        what = {
            "graph": "a tensor with a graph",
            "large": f"it has more than {LARGEST >> 20} MiB, or {MOST} items",
            "opaque": f"a {form}",
        }[kind]
        raise UserError(f"{name} has changed, and no checkpoint can hold it: {what}. {remedy(name)}")

    def _is_unsaved(self, name: str) -> bool:
        return any(name == each or name.endswith(f".{each}") for each in self.unsaved)

    def _holders(self) -> Iterator[tuple[str, Any, set[str]]]:
        for name, root in self._modules.items():
            for inner, module in root.named_modules():
                yield f"{name}.{inner}".removesuffix("."), module, OF_MODULES
        for name, optimizer in self._optimizers.items():
            yield name, optimizer, OF_OPTIMIZERS

    def _weights(self) -> dict[int, tuple[Tensor, str]]:
        """Parameters and buffers with their first names, by id."""
        found: dict[int, tuple[Tensor, str]] = {}
        for name, root in self._modules.items():
            for inner, tensor in [*root.named_parameters(), *root.named_buffers()]:
                found.setdefault(id(tensor), (tensor, f"{name}.{inner}"))
        return found


def remedy(name: str) -> str:
    """What to do about an attribute that cannot be saved."""
    return (
        f"Keep it in a buffer (register_buffer), or compute it from step.number. If no bit depends on it: "
        f"run.steps(..., unsaved=({name.rpartition('.')[2]!r},))"
    )


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
VALUE_OF = {kind: name for name, (types, _, _) in VALUES.items() for kind in types}


class _Walk:
    """Makes a `Look`, from one attribute to the next."""

    def __init__(self, weights: Mapping[int, tuple[Tensor, str]], born: Mapping[int, str], later: bool) -> None:
        self._weights, self._born, self._later = weights, born, later
        self._ways: dict[int, str] = {}
        self._storages = {
            address: name
            for tensor, name in weights.values()
            if not isinstance(tensor, DTensor) and (address := _address(tensor))
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
        if id(held) in self._weights:
            return {"weight": self._weights[id(held)][1]}
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
            return ["large", len(held)]
        if kind == "opaque":
            return [kind, type(held).__name__]
        return [kind, KINDS[kind].take(held, lambda inner, more: self.refer(inner, way + more))]

    def _tensor(self, held: Tensor, way: str) -> list[Any]:
        if not is_plain(held):
            return ["opaque", type(held).__name__]
        if held.numel() * held.element_size() > LARGEST:
            return ["large", [*held.shape, 0 if held.is_inference() else held._version]]
        if held.grad_fn is not None:
            self.look.tensors[way] = held.detach()
            return ["graph", ""]
        address = _address(held)
        if address in self._storages:
            form = [*held.shape], [*held.stride()], held.storage_offset()
            return ["view", [{"weight": self._storages[address]}, *form]]
        if address in self._seen and way.endswith("(new)"):
            return ["opaque", "view of another attribute"]
        if address:
            self._seen.add(address)
        self.look.tensors[way] = held.detach()
        return ["tensor", KINDS["tensor"].take(held, self.refer)]

    def _array(self, held: Any, way: str) -> list[Any]:
        if held.nbytes > LARGEST:
            return ["large", [*held.shape]]
        try:
            self.look.tensors[way] = torch.from_numpy(held.copy())
        except TypeError:  # such as an array of objects
            return ["opaque", f"ndarray of {held.dtype}"]
        return ["array", KINDS["array"].take(held, self.refer)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _references(form: Any) -> Iterator[dict[str, Any]]:
    """The references in the content of an object."""
    for each in form if isinstance(form, list) else []:
        if isinstance(each, dict) and len(each) == 1:
            yield each
            yield from _references(each.get("tuple"))
        yield from _references(each)
