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
from torch import nn

from .errors import UserError
from .kinds import KINDS, VALUES
from .walk import Look, Walk

RECURRENT = {"_flat_weights", "_flat_weight_refs"}  # parameters once more, which torch's recurrent layers look after
OF_MODULES = set(vars(nn.Module())) | RECURRENT
OF_OPTIMIZERS = set(vars(torch.optim.Optimizer([torch.zeros(1)], {})))
UNSAVED = "graph", "large", "opaque", "stateful"  # kinds of objects that no checkpoint can hold


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
        """The attributes that are a part of the model, or share memory with one; whose name."""
        now = self.look()
        found = [(name, each) for name, root in now.roots.items() for each in _references([root])]
        found += [(way, each) for way, (_, form, *_) in now.objects.items() for each in _references(form)]
        return {now.name_of(way): each["part"] for way, each in found if "part" in each}

    def look(self, without: Collection[str] = ()) -> Look:
        """The attributes as they are now, but for those that are `without` of interest."""
        walk = Walk(self._parts(), self._born, self._later)
        for prefix, holder, own in self._holders():
            walk.look.kinds[prefix] = type(holder).__name__
            for key, held in sorted(vars(holder).items(), key=lambda each: str(each[0])):
                name = f"{prefix}.{key}"
                if key not in own and isinstance(key, str) and name not in without and not self._is_unsaved(name):
                    walk.root = name
                    walk.look.roots[name] = walk.refer(held, name)
        return walk.look

    def changed(self) -> dict[str, tuple[str, str]]:
        """What differs from the beginning and can be saved, by the way to it: the attribute's name, the value as text.

        Raises:
            UserError: as `saved`.
        """
        now, texts, _ = self._savable()
        return {way: (now.name_of(way), text) for way, text in texts.items() if text != self._texts.get(way)}

    def lost(self) -> dict[str, str]:
        """What differs from the beginning and cannot be saved: names, and what is to be said of each.

        Raises:
            UserError: as `saved`.
        """
        return self._savable()[2]

    def saved(self) -> dict[str, Any]:
        """What differs from the beginning, for `trees.pack`, but for what is `lost`; nothing where nothing does.

        Raises:
            UserError: the model has other modules, or a new object has state that no checkpoint holds.
        """
        now, texts, lost = self._savable()
        first, graphs = self._first.roots, _graphs(now)
        roots = {name: [each] for name, each in now.roots.items() if name not in graphs and each != first.get(name)}
        roots |= {name: [] for name in first if name not in now.roots and name not in lost}
        inner = {*graphs.values()}
        objects = {
            way: each for way, each in now.objects.items() if texts[way] != self._texts.get(way) and way not in inner
        }
        if not roots and not objects:
            return {}
        tensors = {way: now.tensors[way] for way in objects if way in now.tensors}
        return {"roots": json.dumps(roots, sort_keys=True), "objects": json.dumps(objects), "tensors": tensors}

    def _savable(self) -> tuple[Look, dict[str, str], dict[str, str]]:
        """The attributes that can be saved, their texts, and what else has changed."""
        now, first_kinds, lost = self.look(), self._first.kinds, dict[str, str]()
        kinds = now.kinds
        if odd := sorted(name for name in kinds | first_kinds if kinds.get(name) != first_kinds.get(name)):
            seen, before = (each.get(odd[0], "no module") for each in (kinds, first_kinds))
            raise UserError(
                f"{odd[0]} is {seen}, and was {before} at the beginning: no checkpoint holds which modules a model "
                f"has. Make all before run.steps, and choose one in forward"
            )
        while True:
            texts, inner = now.texts(), {*_graphs(now).values()}
            found = {
                now.name_of(way): (kind, way.replace(" (new)", ""), form[0])
                for way, (kind, *form) in now.objects.items()
                if kind in UNSAVED and texts[way] != self._texts.get(way) and way not in inner
            }
            if not found:
                return now, texts, lost
            for name, (kind, way, what) in found.items():
                place = "" if way == name else f" ({way})"
                if kind == "stateful":
                    raise UserError(
                        f"{name} holds a new {what}{place}, whose state no checkpoint holds: make it before run.steps; "
                        f"give a module or an optimizer to run.steps(state=...), too. {harmless(name)}"
                    )
                lost[name] = f"has changed, and is a {what}{place}"
            now = self.look(lost)

    def put(self, saved: Mapping[str, Any]) -> None:
        """Give the attributes of a fresh beginning what `saved` gave.

        Raises:
            UserError: the beginning was another one.
        """
        roots, objects = (json.loads(saved.get(name, "{}")) for name in ("roots", "objects"))
        tensors = saved.get("tensors", {})
        parts = {name: held for held, name in self._parts().values()}
        made = dict(self._first.held)
        for way, (kind, form) in objects.items():
            if kind == "view":
                made[way] = parts[form[0]["part"]].detach().as_strided(*form[1:])
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
            place = parts if kind == "part" else made
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

    def _is_unsaved(self, name: str) -> bool:
        return any(name == each or name.endswith(f".{each}") for each in self.unsaved)

    def _holders(self) -> Iterator[tuple[str, Any, set[str]]]:
        for name, root in self._modules.items():
            for inner, module in root.named_modules():
                yield f"{name}.{inner}".removesuffix("."), module, OF_MODULES
        for name, optimizer in self._optimizers.items():
            yield name, optimizer, OF_OPTIMIZERS

    def _parts(self) -> dict[int, tuple[Any, str]]:
        """Modules, parameters and buffers with their first names, by id."""
        found: dict[int, tuple[Any, str]] = {}
        for name, root in self._modules.items():
            for inner, held in [*root.named_modules(), *root.named_parameters(), *root.named_buffers()]:
                found.setdefault(id(held), (held, f"{name}.{inner}".removesuffix(".")))
        return found


def harmless(name: str) -> str:
    """The word that says that no bit depends on an attribute."""
    return f"If no bit depends on it: run.steps(..., unsaved=({name.rpartition('.')[2]!r},))"


def remedy(name: str) -> str:
    """What to do about an attribute that cannot be saved."""
    return f"{harmless(name)}; else keep it in a buffer (register_buffer), or compute it from step.number"


def _graphs(now: Look) -> dict[str, str]:
    """The ways to tensors with a graph, which is gone with its step, by the names of the attributes that are one."""
    ways = {name: each["object"] for name, each in now.roots.items() if isinstance(each, dict) and "object" in each}
    return {name: way for name, way in ways.items() if now.objects[way][0] == "graph"}


def _references(form: Any) -> Iterator[dict[str, Any]]:
    """The references in the content of an object."""
    for each in form if isinstance(form, list) else []:
        if isinstance(each, dict) and len(each) == 1:
            yield each
            yield from _references(each.get("tuple"))
        yield from _references(each)
