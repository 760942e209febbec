"""The observations of tools/portability.py on the CPU that runs this: digests of calls."""

import hashlib
import json
import math
import os
import random
import resource
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from portability_cases import Source

portable, flags, settings = (
    import_module(f"samebits.{name}") for name in ("environment.portable", "core.flags", "config.settings")
)

CALLS = 5000  # at most, of each case
MAKES_NOTHING = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize"}


def digest(value: Any) -> str:
    """A digest of arguments or results: values, shapes, strides. All NaN are one."""
    hasher = hashlib.blake2b(digest_size=6)
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach()
        hasher.update(f"{value.dtype}{tuple(value.shape)}{value.layout}".encode())
        if value.layout is not torch.strided or value._is_zerotensor() or value.device.type != "cpu":
            return
        hasher.update(str(value.stride()).encode())
        value = value.resolve_conj().resolve_neg().contiguous()
        value = torch.view_as_real(value) if value.is_complex() else value
        if value.is_floating_point() and bool(value.isnan().any()):
            value = value.masked_fill(value.isnan(), math.nan)
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        _feed(hasher, sorted(value.items()))
    elif isinstance(value, list | tuple):
        hasher.update(f"{len(value)}:".encode())
        for each in value:
            _feed(hasher, each)
            hasher.update(b",")
    else:
        hasher.update(b"generator" if isinstance(value, torch.Generator) else repr(value).encode())


class Observer(TorchDispatchMode):
    """Digests of the calls, by operation, kind of number and input; `None` for inputs with more than one output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, str | None]] = {}
        self.left = 0  # calls that the case may make

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See one call."""
        kwargs = kwargs or {}
        if function.namespace in portable.SILENT:
            return function(*args, **kwargs)
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("more calls than a case is to make: a loop over all elements")
        draws = torch.Tag.nondeterministic_seeded in function.tags
        given = digest([args, kwargs, torch.get_rng_state() if draws else None])
        result = function(*args, **kwargs)
        name, kind = portable.operation(function, args, result)
        changed = [
            kwargs.get(argument.name) if argument.kwarg_only else args[place] if place < len(args) else None
            for place, argument in enumerate(function._schema.arguments)
            if argument.is_write
        ]
        made = "" if name in MAKES_NOTHING else digest([result, changed, torch.get_rng_state() if draws else None])
        calls = self.calls.setdefault(f"{name} {kind}", {})
        given = f"{function.overloadpacket.__name__}.{function._overloadname}{given}"
        given = hashlib.blake2b(given.encode(), digest_size=6).hexdigest()
        calls[given] = made if calls.get(given, made) == made else None
        return result


def differentiable() -> Iterator[str]:
    """The operations of this torch that have a derivative of their own and a kernel for the CPU."""
    for name in torch._C._dispatch_get_all_op_names():
        has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
        if name.startswith("aten::") and has("AutogradCPU") and not has("CompositeImplicitAutograd") and has("CPU"):
            yield portable.plain(name)


def observe(place: int, source: "Source", file: Path) -> None:
    """Observe all cases of a source, with generators that are seeded for each."""
    observer, failed = Observer(), {}
    seed(place)
    for number, (name, compute) in enumerate(source()):
        state = torch.get_rng_state()
        torch.manual_seed(number)
        observer.left = CALLS
        try:
            with observer:
                compute()
        except Exception as error:  # an operation without a deterministic kernel, a sample that wants another thing
            failed[name] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        torch.set_rng_state(state)
    file.write_text(json.dumps({"calls": observer.calls, "failed": failed}))


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def apart(place: int, name: str, source: "Source", seconds: int) -> dict[str, Any]:
    """What a source gives in a process of its own: QEMU crashes in a few, and some loop for hours under it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "one.json")
        if not (child := os.fork()):
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            observe(place, source, file)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            return {"calls": {}, "failed": {name: f"the process ended with {status}"}}
        return json.loads(file.read_text())


def observed(extent: str) -> dict[str, Any]:
    """Observe all sources, to this extent."""
    warnings.simplefilter("ignore")
    flags.apply(settings.Determinism(cpu="portable", relax=()))  # torch's samples forbid it once they are loaded
    # they are part of torch's own tests, whose base class comes from a package that is not needed here
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from portability_cases import EXTENTS, sources

    torch.utils.deterministic.fill_uninitialized_memory = True  # so that inputs repeat which a call only writes
    calls: dict[str, dict[str, str | None]] = {}
    failed: dict[str, str] = {}
    for place, (name, source) in enumerate(sources(EXTENTS[extent])):
        seen = apart(place, name, source, EXTENTS[extent].seconds)
        failed |= seen["failed"]
        for operation, outputs in seen["calls"].items():
            known = calls.setdefault(operation, {})
            known |= {given: made if known.get(given, made) == made else None for given, made in outputs.items()}
    facts: dict[str, Any] = {"torch": torch.__version__.partition("+")[0], "build": torch.__version__}
    return facts | {"differentiable": sorted(set(differentiable())), "calls": calls, "failed": failed}
