"""Probes: quick looks at what functions and datasets of the owner's refer to, without calling any code of theirs.

A walk follows attributes, slots, containers, closures, defaults and the global variables that a function mentions. Of a
bound method it follows only what the method mentions, for its object may be a whole trainer. Decorators are skipped:
they time, log and count calls.
"""

import ctypes
import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property, lru_cache, partial
from inspect import getattr_static
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from ..core.generators import OWN, slots_of

MOST_ENTRIES, MOST_ITEMS = 2000, 200  # of a walk, and of one container
WHOLE, NUM_SAMPLED = 1 << 15, 64  # bytes of an array that is compared whole, and numbers of a larger one
PREFIX = 4096  # bytes of a tensor, which has a version, too
PLAIN = bool, int, float, complex, str, bytes, type(None), Path, Enum, numpy.generic, torch.dtype, torch.device
CONTAINERS = list, tuple, deque, dict, set, frozenset
IMMUTABLE = tuple, frozenset, partial  # what is in them may change, they do not
GENERATORS = tuple(OWN)  # they are seeded for each sample
STDLIB = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib")))
INSTALLED = tuple(map(sysconfig.get_path, ("purelib", "platlib")))
OF_MODULES = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}

Entries = list[tuple[Any, Any]]


class Content(NamedTuple):
    """A comparable value of an object itself, without what it refers to, and words for it."""

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


def walk(roots: Mapping[str, object]) -> tuple[dict[str, object], list[Probe]]:
    """Return comparable values by path, breadth first, and the probes that look at them again."""
    values, probes = dict[str, object](), list[Probe]()
    visited = dict[int, object]()  # the references keep ids from being given to other objects
    queue, num_entries = deque((path, root, False) for path, root in roots.items()), 0
    while queue and num_entries < MOST_ENTRIES:
        path, value, is_installed = queue.popleft()
        if isinstance(value, float | complex | numpy.generic):
            values.setdefault(path, Content(repr(value)))  # also of a NaN
        elif isinstance(value, (*PLAIN, Content)):
            values.setdefault(path, value)
        elif id(value) not in visited and not isinstance(value, GENERATORS):
            visited[id(value)] = value
            values.setdefault(path, _content(value, is_installed))
            with suppress(Exception):  # an unusual object is no reason to end a run
                for probe in _probes(path, value, is_installed):
                    entries = probe.read()
                    if not isinstance(value, IMMUTABLE):
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
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if not tensor.nbytes or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() < end:  # a freed one
        return 0
    return zlib.crc32((ctypes.c_char * min(tensor.nbytes, PREFIX)).from_address(tensor.data_ptr()))


def _checksum(array: Any) -> int:
    if array.dtype.hasobject or not array.flags.writeable:  # such as a file that is mapped to be read
        return 0
    numbers = array if array.nbytes <= WHOLE else array.flat[:: 1 + array.size // NUM_SAMPLED]
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


_slots = lru_cache(4096)(slots_of)


@lru_cache(4096)
def _computed(kind: Any) -> frozenset[str]:
    """Return the names of attributes that appear when they are first used, and those that torch looks after."""
    names = {name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, cached_property)}
    return frozenset(names | OF_MODULES if issubclass(kind, nn.Module) else names)


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
    """Return the function behind an attribute of a class, or behind decorators; None if there is none."""
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
    scopes = {str(function.__module__): function.__globals__}
    for name in names & function.__globals__.keys():
        module = function.__globals__[name]
        if isinstance(module, ModuleType) and _origin(module.__name__) == "own":
            scopes[module.__name__] = vars(module)
    for module_name, variables in scopes.items():
        yield _variables(variables, sorted(names & variables.keys()), module_name.rpartition(".")[2])


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
