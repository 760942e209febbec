"""Refusal of a loop that changes what samples are made from: the dataset, its `collate` function or its order.

A loader worker has a copy of these from before the first step. A loop that sets `train_set.strength = 0.3` changes the
samples without loader workers, and changes none with them: a neutral key would decide the weights.

What changes while a sample is made, such as a cache, is the dataset's own doing: `making` marks these moments. The
search is bounded. The proof of a run trains parts of it with loader workers, and finds what the search does not reach.
"""

import ctypes
import re
import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cached_property, lru_cache, partial
from inspect import getattr_static
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from ..base.shape import shown
from ..core.errors import UserError
from ..core.generators import OWN
from ..core.observer import Ballot, Observer, View
from .carried import owners_frames

MOST_VALUES, MOST_ITEMS = 2000, 200  # all that are compared, and those of one container
SMALL, NUM_SAMPLED, PREFIX = (
    1 << 15,
    64,
    4096,
)  # bytes of an array that is compared whole, numbers of a larger one; bytes of a tensor
PLAIN = bool, int, float, complex, str, bytes, type(None), Path, Enum, numpy.generic, torch.dtype, torch.device
CONTAINERS = list, tuple, deque, dict, set, frozenset
GENERATORS = tuple(OWN)  # they are seeded for each sample
STDLIB = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib")))
INSTALLED = tuple(map(sysconfig.get_path, ("purelib", "platlib")))
OF_MODULES = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}

Entries = list[tuple[Any, Any]]


class Content(NamedTuple):
    """What can be compared of an object itself, without what it refers to, and words for it."""

    words: str
    value: object = None


NOTHING = Content("nothing")


class Probe(NamedTuple):
    """A quick look at one object.

    Attributes:
        read: returns pairs of a key and a value. Two lists of them are equal if nothing has changed.
        path_of: returns the words that lead to the value of a key.
        is_installed: whether a class of an installed library holds the object; it may add entries when it is used.
    """

    read: Callable[[], Entries]
    path_of: Callable[[Any], str]
    is_installed: bool = False


class DataWatch(Observer):
    """Compares what samples are made from before and after the lines of the loop."""

    name = "data watch"

    def __init__(self, roots: Mapping[str, object], unsaved: Collection[str]) -> None:
        """Look at `roots`, by the owner's names for them.

        No sample depends on attributes whose names, in full or by the last word, are in `unsaved`.
        """
        self._roots, self._unsaved = roots, unsaved
        self._has_made = False
        self._begin()

    def _begin(self) -> None:
        self._probes = _walk(self._roots)[1]
        self._look()

    def _look(self) -> None:
        self._entries = [probe.read() for probe in self._probes]

    @contextmanager
    def making(self) -> Iterator[None]:
        """Let the dataset change itself while samples are made in this process.

        Raises:
            UserError: the loop changed something before.
        """
        self.require()
        try:
            yield
        finally:
            if self._has_made:
                self._look()
            else:  # some datasets open their files with the first sample
                self._has_made = True
                self._begin()

    def ballot(self, view: View) -> Ballot:
        """Look at the end of each step, so that the run also stops where loader workers make the samples."""
        self.require()
        return Ballot()

    def require(self) -> None:
        """Refuse a change since the last look.

        Raises:
            UserError: the loop changed a value, which the message names.
        """
        for probe, before in zip(self._probes, self._entries, strict=True):
            now = probe.read()
            if _are_equal(before, now):
                continue
            old, new = dict(before), dict(now)
            for key in old if probe.is_installed else old | new:
                self._require_equal(probe.path_of(key), old.get(key, NOTHING), new.get(key, NOTHING))

    def _require_equal(self, path: str, old: object, new: object) -> None:
        if old is new or self._is_unsaved(path):
            return
        before, now = (_walk({path: value})[0] for value in (old, new))
        for inner in before | now:
            olds, news = before.get(inner, NOTHING), now.get(inner, NOTHING)
            if olds != news and not self._is_unsaved(inner):
                name = inner.rpartition(".")[2].partition("[")[0]
                old_words, new_words = _worded(olds), _worded(news)
                if old_words == new_words:
                    new_words = "other numbers"
                raise UserError(
                    f"{inner}: expected {old_words} in all steps, got {new_words}. The loop changed it, and "
                    f"loader workers have copies that stay as they were. Compute it where samples are made, such as "
                    f"from samebits.item_epoch(). If no sample depends on it: run.steps(..., unsaved=({name!r},))"
                )

    def _is_unsaved(self, path: str) -> bool:
        return any(re.search(rf"(^|\.){re.escape(name)}($|[.\[])", path) for name in self._unsaved)


def names_of(objects: Mapping[str, object]) -> dict[str, object]:
    """Return objects by the name of a variable of the loop's function that holds each, or else by the name given."""
    variables = {id(value): name for frame in owners_frames() for name, value in frame.f_locals.items()}
    return {variables.get(id(value), name): value for name, value in objects.items() if value is not None}


def _are_equal(before: Entries, now: Entries) -> bool:
    try:
        return before == now  # identical values are not compared, so this mostly calls no code of theirs
    except Exception:  # two arrays, or what else cannot be compared
        return False


def _worded(value: object) -> str:
    return value.words if isinstance(value, Content) else shown(value)


def _walk(roots: Mapping[str, object]) -> tuple[dict[str, object], list[Probe]]:
    """Return comparable values by path, breadth first, and the probes that look at them again."""
    values, probes, seen = dict[str, object](), list[Probe](), dict[int, object]()
    queue, num_entries = deque((path, root, False) for path, root in roots.items()), 0
    while queue and num_entries < MOST_VALUES:
        path, value, is_installed = queue.popleft()
        if isinstance(value, float | complex | numpy.generic):
            values.setdefault(path, Content(repr(value)))  # also of a NaN
        elif isinstance(value, (*PLAIN, Content)):
            values.setdefault(path, value)
        elif id(value) not in seen and not isinstance(value, GENERATORS):
            seen[id(value)] = value  # a reference, so that no other object gets this id
            values.setdefault(path, _content(value, is_installed))
            with suppress(Exception):  # an unusual object is no reason to end a run
                for probe in _probes(path, value, is_installed):
                    entries = probe.read()
                    probes.append(probe)
                    num_entries += len(entries)
                    queue.extend((probe.path_of(key), inner, probe.is_installed) for key, inner in entries)
    return values, probes


def _content(value: Any, is_installed: bool) -> Content:
    kind = type(value).__name__
    if isinstance(value, FunctionType):
        return Content(f"the function {value.__qualname__}", value.__code__)
    if isinstance(value, type):
        return Content(f"the class {value.__qualname__}")
    if isinstance(value, CONTAINERS) and not is_installed:
        return Content(f"a {kind} of {len(value)}")
    return Content(f"a {kind}")


def _probes(path: str, value: Any, is_installed: bool) -> Iterator[Probe]:
    """Return probes of what an object holds, and samples may be made from."""
    if isinstance(value, Tensor | numpy.ndarray | SynchronizedBase | ctypes.Array | ctypes._SimpleCData):
        yield Probe(lambda: [(None, _numbers(value))], lambda key: path)
    elif isinstance(value, set | frozenset):
        yield Probe(lambda: [(None, _members(value))], lambda key: path)
    elif isinstance(value, dict):
        yield Probe(lambda: [*islice(value.items(), MOST_ITEMS)], lambda key: f"{path}[{key!r}]", is_installed)
        if not is_installed:
            yield _length(path, value)
    elif isinstance(value, list | tuple | deque):
        step = 1 + len(value) // MOST_ITEMS
        items = islice if isinstance(value, deque) else lambda items, *cut: items[slice(*cut)]
        yield Probe(
            lambda: [*enumerate(items(value, 0, None, step))], lambda key: f"{path}[{key * step}]", is_installed
        )
        yield _length(path, value)
    elif isinstance(value, partial):
        parts = [(name, getattr(value, name)) for name in ("func", "args", "keywords")]
        yield Probe(lambda: parts, lambda key: f"{path}.{key}")
    elif isinstance(value, MethodType):
        yield from _probes_of_method(path, value)
    elif function := _function(value):
        yield from _probes_of_function(function, _names(function.__code__))
    elif isinstance(value, type):
        yield from _probes_of_class(value, None)
    elif not isinstance(value, ModuleType):
        origin = _origin(type(value).__module__)
        if origin != "standard" or isinstance(value, SimpleNamespace):
            yield Probe(lambda: _attributes(value), lambda key: f"{path}.{key}", origin == "installed")
        if origin == "own":
            yield from _probes_of_class(type(value), None)


def _length(path: str, value: Collection[Any]) -> Probe:
    return Probe(lambda: [(None, Content(f"a {type(value).__name__} of {len(value)}"))], lambda key: path)


def _numbers(value: Any) -> Content:
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        return Content(f"a tensor of {[*value.shape]}, version {version}", (version, _checksum_of_tensor(value)))
    if isinstance(value, numpy.ndarray):
        return Content(f"an array of {[*value.shape]}", (value.shape, _checksum(value)))
    shared = value.get_obj() if isinstance(value, SynchronizedBase) else value
    return Content(f"a shared value {bytes(shared).hex()[:16]}", bytes(shared))


def _members(value: Collection[Any]) -> Content:
    members = frozenset(value) if len(value) <= MOST_ITEMS else None
    return Content(f"a {type(value).__name__} of {len(value)}", members)


def _checksum_of_tensor(tensor: Tensor) -> int:
    """Return a checksum of the first bytes: `tensor.data.mul_()` changes no version."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_cpu or tensor.layout != torch.strided:
        return 0
    if not tensor.is_contiguous() or not (address := tensor.data_ptr()):
        return 0
    return zlib.crc32((ctypes.c_char * min(tensor.nbytes, PREFIX)).from_address(address))


def _checksum(array: Any) -> int:
    if array.dtype.hasobject or not array.flags.writeable:  # such as a file that is mapped to be read
        return 0
    numbers = array if array.nbytes <= SMALL else array.flat[:: 1 + array.size // NUM_SAMPLED]
    return zlib.crc32(numpy.ascontiguousarray(numbers).view(numpy.uint8).reshape(-1).data)


def _attributes(value: Any) -> Entries:
    """Return the attributes that an object has of its own, without calling any code of it."""
    kind: Any = type(value)
    left_out = _computed(kind)
    attributes = [pair for pair in getattr(value, "__dict__", {}).items() if pair[0] not in left_out]
    for name, slot in _slots(kind):
        with suppress(AttributeError):  # nothing was assigned
            attributes.append((name, slot.__get__(value)))
    return attributes


@lru_cache(4096)
def _computed(kind: Any) -> frozenset[str]:
    """Return the names of attributes that appear when they are first used, and those that torch looks after."""
    names = {name for base in kind.__mro__ for name, held in vars(base).items() if isinstance(held, cached_property)}
    return frozenset(names | OF_MODULES if issubclass(kind, nn.Module) else names)


@lru_cache(4096)
def _slots(kind: Any) -> list[tuple[str, Any]]:
    members = [pair for base in kind.__mro__ for pair in vars(base).items()]
    return [(name, slot) for name, slot in members if isinstance(slot, MemberDescriptorType)]


def _probes_of_class(kind: type, names: Collection[str] | None) -> Iterator[Probe]:
    """Return probes of an owner's class: of its values and what its functions mention; of `names` alone, if given."""
    for base in kind.__mro__:
        if _origin(base.__module__) != "own":
            continue
        values = []
        for name, value in vars(base).items():
            if names is not None and name not in names:
                continue
            if function := _function(value):
                yield from _probes_of_function(function, _names(function.__code__))
            elif not name.startswith("__") and isinstance(value, (*PLAIN, *CONTAINERS, Tensor, numpy.ndarray)):
                values.append(name)
        yield _variables(vars(base), values, base.__name__)


def _function(value: Any) -> FunctionType | None:
    """Return the function behind an attribute of a class, without its decorators: they time, log and count calls."""
    for kind, name in [(staticmethod, "__func__"), (classmethod, "__func__"), (property, "fget")]:
        if isinstance(value, kind):
            value = getattr(value, name)
    while isinstance(inner := getattr_static(value, "__wrapped__", None), FunctionType):
        value = inner
    return value if isinstance(value, FunctionType) else None


def _probes_of_method(path: str, method: MethodType) -> Iterator[Probe]:
    """Return probes of what a bound method mentions: its object may hold a whole trainer."""
    holder: Any = method.__self__
    kind: Any = type(holder)
    functions, names = [_function(method.__func__)], set[str]()
    for function in functions:  # the list grows
        if function and _origin(function.__module__) == "own":
            further = _names(function.__code__) - names
            names |= further
            functions += [_function(getattr_static(kind, name, None)) for name in sorted(further)]
            yield from _probes_of_function(function, _names(function.__code__))
    prefix = path.rpartition(".")[0] or path
    sources = [holder.__dict__] if hasattr(holder, "__dict__") else []
    if isinstance(holder, nn.Module):
        sources += [holder._parameters, holder._buffers, holder._modules]
    for variables in sources:
        yield _variables(variables, sorted(names - _computed(kind)), prefix)
    yield from _probes_of_class(kind, names)


def _probes_of_function(function: FunctionType, names: Collection[str]) -> Iterator[Probe]:
    """Return probes of the variables around a function of the owner's that its code mentions."""
    if _origin(function.__module__) != "own":
        return
    code, cells = function.__code__, function.__closure__ or ()
    yield Probe(lambda: _cells(code, cells), str)
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield Probe(lambda: [*enumerate(defaults)], lambda key: f"{function.__name__}, default {key}")
    variables, modules = function.__globals__, list[ModuleType]()
    for name in names & variables.keys():
        if isinstance(variables[name], ModuleType) and _origin(variables[name].__name__) == "own":
            modules.append(variables[name])
    for held, module in [(variables, str(function.__module__)), *((vars(each), each.__name__) for each in modules)]:
        yield _variables(held, sorted(names & held.keys()), module.rpartition(".")[2])


def _variables(variables: Mapping[str, Any], names: Sequence[str], prefix: str) -> Probe:
    return Probe(
        lambda: [(name, variables[name]) for name in names if name in variables],
        lambda key: f"{prefix}.{key}",
    )


def _cells(code: CodeType, cells: Sequence[CellType]) -> Entries:
    variables = []
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with suppress(ValueError):  # the variable has no value yet
            variables.append((name, cell.cell_contents))
    return variables


@lru_cache(4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of variables and attributes, and the texts, that stand in a function and those inside it."""
    names = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return frozenset(names.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))))


@lru_cache(4096)
def _origin(module: str | None) -> str:
    """Return the origin of a module: `own` (the owner's), `installed` (samebits too) or `standard` (Python's)."""
    module = str(module)
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return "installed"
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:  # built in, or typed at a prompt
        return "own" if module == "__main__" else "standard"
    if path.startswith(INSTALLED):
        return "installed"
    return "standard" if path.startswith(STDLIB) else "own"
