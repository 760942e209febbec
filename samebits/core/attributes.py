"""Plain attributes of modules and of an own optimizer: state that lies in no `state_dict`.

    model.temperature *= 0.9              # a number that the loop changes
    self.history = deque(maxlen=10)       # a container, a tensor, an array
    self.tied = [self.embedding.weight]   # an alias, which stays one

They are looked at as references to objects, and objects as what they hold. What differs from the beginning of the loop
is saved. A resumed run makes its beginning anew: objects of then are filled in place, so whatever refers to them goes
on to do so; others are made.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError
from .kinds import KINDS, VALUES
from .walk import LARGEST, MOST, Look, Walk

RECURRENT = {"_flat_weights", "_flat_weight_refs"}  # parameters once more, which torch's recurrent layers look after
OF_MODULES = set(vars(nn.Module())) | RECURRENT
OF_OPTIMIZERS = set(vars(torch.optim.Optimizer([torch.zeros(1)], {})))
UNSAVED = "graph", "large", "opaque"  # kinds of objects that no checkpoint can hold


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

    def leave_out(self, name: str) -> None:
        """No bit depends on this attribute, as if `begin` had been given its name."""
        self.unsaved = {*self.unsaved, name}
        self._first.roots.pop(name, None)

    def aliases(self) -> dict[str, str]:
        """The attributes that are, or share memory with, a parameter or a buffer; whose name."""
        now = self.look()
        found = [(name, each) for name, root in now.roots.items() for each in _references([root])]
        found += [(way, each) for way, (_, form) in now.objects.items() for each in _references(form)]
        return {now.name_of(way): each["weight"] for way, each in found if "weight" in each}

    def look(self) -> Look:
        """The attributes as they are now."""
        walk = Walk(self._weights(), self._born, self._later)
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


def _references(form: Any) -> Iterator[dict[str, Any]]:
    """The references in the content of an object."""
    for each in form if isinstance(form, list) else []:
        if isinstance(each, dict) and len(each) == 1:
            yield each
            yield from _references(each.get("tuple"))
        yield from _references(each)
