"""The operations that a run calls until its first step is done, and those whose bits may depend on the CPU.

Weights are made and a step is made under a dispatch mode, which sees each call on its way to a kernel. It changes no
argument and no result. Calls of the library are its own business, and proved by the template's tests.

A call is told with its place: the module whose `forward` is under way, and the line that is nearest to it outside
torch. In the backward pass no line runs. Each node there was made by a call of the forward pass and bears its number.

What torch.compile compiles is compiled here as in every other step, and noted by its first line.
"""

import inspect
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.project import LIBRARY
from . import portable

OURS = str(LIBRARY)
TORCH = str(Path(torch.__file__).parent)
STANDARD, PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")  # one may hold the other
OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
EXACT = "samebits.sqrt"
REPLACEMENTS = {
    "sqrt": f"{EXACT}(x)",
    "pow(0.5)": f"{EXACT}(x)",
    "pow(-0.5)": "torch.rsqrt(x)",
    "_foreach_sqrt": "an optimizer with fused=True, such as AdamW",
    "_foreach_pow(0.5)": f"{EXACT}(x)",
    "_euclidean_dist": "torch.cdist(..., compute_mode='donot_use_mm_for_euclid_dist')",
}


@dataclass(frozen=True)
class Place:
    """Where a call came from."""

    module: nn.Module | None
    line: str  # file:line
    optimizer: type[torch.optim.Optimizer] | None = None  # of torch's, whose step is under way

    def shown(self, names: dict[nn.Module, str]) -> str:
        """In words; `names` are those of the model's modules."""
        if self.module is None:
            return self.line
        name, kind = names.get(self.module), type(self.module).__name__
        return f"{self.line}, in {f'{name} ({kind})' if name else kind}"


class Operations:
    """Sees calls between `begin` and `rest`, and those that are `watched`; what is compiled, also where not wanted."""

    def __init__(self, wanted: bool = True) -> None:
        self._mode = _Mode() if wanted else None
        self._on = False
        self._compiled: str | None = None

    def begin(self) -> None:
        """From here on calls are seen."""
        callback_handler.register_start_callback(self._compiles)
        self._flag(True)

    def end(self) -> None:
        """From here on nothing is seen, and nothing costs time."""
        self._flag(False)
        self._mode = None
        with suppress(ValueError):  # it has not begun, or has ended
            callback_handler.remove_start_callback(self._compiles)

    def _compiles(self, arguments: CallbackArgs) -> None:
        if self._compiled is None:
            self._compiled = _line(sys._getframe(1))

    def rest(self) -> None:
        """From here on nothing is seen but what is `watched`."""
        self._flag(False)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Calls in here are seen."""
        before = self._on
        self._flag(True)
        try:
            yield
        finally:
            self._flag(before)

    def non_portable(self, model: nn.Module) -> dict[str, str]:
        """Operations that were met and are not known to be portable, each with a line on its first call."""
        names = {module: name for name, module in model.named_modules()}
        met = self._mode.non_portable if self._mode else {}
        lines = {
            name: f"{name} at {place.shown(names)}: {_standing(name)}{_replacement(name, place)}"
            for name, place in met.items()
        }
        if self._compiled is not None:
            lines[portable.COMPILED] = (
                f"{portable.COMPILED} at {self._compiled}: its bits depend on the compiler and the CPU"
            )
        return lines

    def _flag(self, on: bool) -> None:
        if self._mode and on != self._on:
            self._on = on
            if on:
                self._mode.__enter__()
            else:
                self._mode.__exit__(None, None, None)


def _standing(operation: str) -> str:
    name, kind = operation.split()
    differs = f"{portable.DIFFERS}{kind}" in portable.table().get(name, ())
    return "its bits differ between CPUs" if differs else "it is not in the portability table"


def _replacement(operation: str, place: Place) -> str:
    if place.optimizer:
        fused = "fused" in inspect.signature(place.optimizer).parameters
        instead = f"{place.optimizer.__name__}(..., fused=True)" if fused else REPLACEMENTS["_foreach_sqrt"]
    else:
        instead = REPLACEMENTS.get(operation.split()[0], "")
    return f". Use {instead}" if instead else ""


def _line(frame: FrameType | None) -> str:
    """The line that is nearest to a frame outside torch and this library."""
    while frame and not _is_line(frame, OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "the backward pass"


def _is_line(frame: FrameType, *others: str) -> bool:
    """Whether a frame is of a file that somebody has written, outside torch, Python and these `others`."""
    file = frame.f_code.co_filename
    made = file.startswith("<") or str(frame.f_globals.get("__name__", "")).startswith("torch.")  # by a compiler
    made = made or (file.startswith(STANDARD) and not file.startswith(PACKAGES))  # copy.deepcopy, say
    return not made and not file.startswith((TORCH, *others))


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else torch.compile would skip what it meets in the first step, and for good in this process."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.non_portable: dict[str, Place] = {}
        self._of_node: dict[int, Place] = {}  # by the number that autograd gives the node of a call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "namespace", "") not in portable.SILENT:
            place = self._place(sys._getframe(1))
            name, kind = portable.operation(function, args, result)
            if place and kind not in portable.table().get(name, ()) and not portable.is_exact(name, args, result):
                self.non_portable.setdefault(f"{name} {kind}", place)
        return result

    def _place(self, frame: FrameType | None) -> Place | None:
        """The place of a call that this frame leads to; None if it is the library's own."""
        module, line, optimizer = None, "", None
        while frame:
            file = frame.f_code.co_filename
            if file.startswith(TORCH):
                if frame.f_code.co_name == "_engine_run_backward":
                    # what has a line all the same is code of the owner's: a hook, or a function's own backward
                    return Place(module, line) if line else self._of_backward()
                held = frame.f_locals.get("self") if file.startswith(OPTIMIZERS) and not line else None
                optimizer = type(held) if isinstance(held, torch.optim.Optimizer) else optimizer
            elif file.startswith(OURS) and not line:
                return None
            elif not line and _is_line(frame):
                line = f"{Path(file).name}:{frame.f_lineno}"
            if module is None and frame.f_code.co_varnames[:1] == ("self",):
                here = frame.f_locals.get("self")
                module = here if isinstance(here, nn.Module) else None
            if module and line:
                break
            frame = frame.f_back
        place = Place(module, line, optimizer)
        self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, place)  # type: ignore[attr-defined]
        return place

    def _of_backward(self) -> Place:
        """The place of the call whose gradient is under way."""
        node = torch._C._current_autograd_node()
        return self._of_node.get(node._sequence_nr() if node else -1) or Place(None, "the backward pass")
