"""A training that ends after its first step, in which each call of the owner's is compared with torch's catalogue.

    python -m samebits.analysis.audit.audited REPORT ARGUMENTS

`samebits audit` starts it; ARGUMENTS are those of `train`. It is the owner's own training with all its flags. Only the
watch that every run keeps of its first step is another one. An operation that raises because it has no deterministic
kernel is noted and called once more without that mode, and it alone: `warn_only` would give other operations another
kernel than a run takes.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...base.files import write_json
from ...core.flags import FLAGS
from ...environment import watch as operations
from ...environment.watch import Operations, Place
from ...run import Added
from .. import child
from . import catalogue
from .catalogue import Call, Verdict

RAISES = "does not have a deterministic implementation"
BACKWARD = "the backward pass"


@dataclass
class Met:
    """An operation at a place: what the catalogue says of it, and whether it raised here."""

    place: Place
    raised: bool = False
    verdicts: list[Verdict] = field(default_factory=list)


class Watch(operations._Mode):
    """Sees what the run's own watch sees, and compares it with the catalogue as well."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[tuple[str, str, str], Met] = {}  # by operation, file and line
        self.held: dict[str, str] = {}  # operations, and the flags that hold them
        self.calls = 0
        self.files: dict[Place, str] = {}  # whole paths: a place has the name alone
        self._caller: FrameType | None = None
        self._derived = False  # torch's own formula of a gradient calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Nothing is compiled in an audit: it looks at each operation that the owner has written."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._caller = sys._getframe().f_back
        self.calls += 1
        raised = False
        try:
            result = super().__torch_dispatch__(function, types, args, kwargs)
        except RuntimeError as error:
            if RAISES not in str(error) or not self._place(None):
                raise  # of the library's own calls none may
            raised = True
            with _undetermined():
                result = super().__torch_dispatch__(function, types, args, kwargs)
        self._compare(Call(function, args, kwargs or {}), raised)
        self._caller = None
        return result

    def _compare(self, call: Call, raised: bool) -> None:
        found = catalogue.verdicts(call)
        if not (found or raised) or not (place := self._place(None)):
            return
        if self._derived and not call.name.endswith("_backward"):
            # the catalogue says of the function itself whether its gradient is at risk, but not of all that throw
            found = [verdict for verdict in found if verdict.entry.throws]
        held = {verdict.row.held for verdict in found if verdict.row.held in _in_force()}
        self.held |= dict.fromkeys([call.name] if held else [], *held)
        found = [verdict for verdict in found if verdict.row.held not in held]
        if found or raised:
            met = self.met.setdefault((call.name, self.files.get(place, ""), place.line), Met(place))
            met.raised |= raised
            met.verdicts += [verdict for verdict in found if verdict not in met.verdicts]

    def _place(self, frame: FrameType | None) -> Place | None:
        """The place of the call that is under way: the frames between are this watch's own."""
        self._derived = False
        outside = self._caller
        while outside and outside.f_code.co_filename.startswith(operations.TORCH):
            outside = outside.f_back
        if not outside:
            return self._of_backward()  # on a GPU it has a thread of its own
        place = super()._place(self._caller)
        if place and not self._derived:
            self.files.setdefault(place, outside.f_code.co_filename)
        return place

    def _of_backward(self) -> Place:
        self._derived = True
        return super()._of_backward()

    def facts(self, names: dict[nn.Module, str]) -> list[dict[str, Any]]:
        """The operations that were met, each with its place; `names` are those of the model's modules."""
        return [
            {"operation": name, "raised": met.raised, "verdicts": [_reported(verdict) for verdict in met.verdicts]}
            | self.where(met.place, names)
            | {"instead": next((verdict.row.instead for verdict in met.verdicts if verdict.row.instead), "")}
            for (name, *_), met in self.met.items()
        ]

    def where(self, place: Place, names: dict[nn.Module, str]) -> dict[str, Any]:
        """A place as file, line and module."""
        file, _, line = place.line.rpartition(":")
        module = place.shown(names).removeprefix(place.line).removeprefix(", in ")
        if not line.isdigit():
            return {"file": "", "line": 0, "module": module or BACKWARD}
        return {"file": self.files.get(place, file), "line": int(line), "module": module}


def _reported(verdict: Verdict) -> dict[str, Any]:
    entry = verdict.entry
    return {"name": entry.name, "throws": entry.throws, "device": verdict.device}


def _in_force() -> set[str]:
    """The flags that hold operations, as far as they are strict."""
    wanted = {row.held for row in catalogue.ROWS.values()}
    return {row.name for row in FLAGS if row.name in wanted and row.read() == row.strict}


@contextmanager
def _undetermined() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch._C._set_deterministic_algorithms(False, warn_only=False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class Audited(Operations):
    """The watch of a run, which writes down what it saw when the first step is done."""

    def __init__(self, watch: Watch, report: Path, wanted: bool) -> None:
        super().__init__()
        self._watch, self._report, self._promises_portable = watch, report, wanted
        self._mode = watch

    def non_portable(self, model: nn.Module) -> Mapping[str, str]:  # type: ignore[override]
        """As every run has it, and the report besides."""
        names = {module: name for name, module in model.named_modules()}
        lines = super().non_portable(model) if self._promises_portable else {}
        portability = []
        for name, line in lines.items():
            place = self._watch.non_portable[name]
            why, _, instead = line.removeprefix(f"{name} at {place.shown(names)}: ").partition(". Use ")
            portability.append({"operation": name, "why": why, "instead": instead} | self._watch.where(place, names))
        write(self._report, self._watch, self._watch.facts(names), portability, self._promises_portable)
        return lines


def write(
    report: Path, watch: Watch, met: list[dict[str, Any]], portability: list[dict[str, Any]], portable: bool
) -> None:
    """Write the report."""
    facts = {
        "operations": met,
        "portability": portability,
        "portable": portable,
        "held": watch.held,
        "calls": watch.calls,
        "strict": torch.are_deterministic_algorithms_enabled(),
        "torch": torch.__version__,
        "cuda": torch.cuda.is_available(),
        "listed": len(catalogue.entries()),
        "unknown": catalogue.unknown(),
    }
    write_json(report, facts)


def _run(report: str, *arguments: str) -> None:
    watch, path = Watch(), Path(report)
    try:
        child.train(Added(watch=partial(Audited, watch, path)), *arguments)
    finally:
        if not path.exists():  # the step was not done
            write(path, watch, watch.facts({}), [], False)


if __name__ == "__main__":
    _run(*sys.argv[1:])
