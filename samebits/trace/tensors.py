"""The tensors of one step, kept whole so that two runs can be compared by value."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..record.names import TRACE, VALUES

OWN = "batch ", "output "  # begin the names of what each rank has for itself; all hold the others alike


class Kept:
    """Takes tensors in while the step that is asked for runs, in the order in which they come to be."""

    def __init__(self, step: int, path: Path) -> None:
        """`step` counts from 0; a negative one keeps nothing."""
        self.step, self.path, self.active = step, path, False
        self._tensors: dict[str, Tensor] = {}

    def begin(self, step: int) -> None:
        """A step begins."""
        self.active = step == self.step

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these tensors, if this is the step: what comes next may work in place."""
        if self.active:
            self._tensors |= {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def save(self, is_main: bool) -> None:
        """Write down all that was taken in; a rank that is not the main one, what it alone has."""
        kept = {name: value.contiguous() for name, value in self._tensors.items() if is_main or name.startswith(OWN)}
        save_file(kept, self.path, {"order": json.dumps(list(kept))})
        self._tensors = {}


def read(run: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the step that a run has kept, of all ranks: batches and outputs, then those that all hold."""
    path = run / VALUES
    files = [safe_open(each, "pt") for each in sorted((run / TRACE).glob(f"{path.stem}*{path.suffix}"))]
    named = [(name, file) for file in files for name in json.loads(file.metadata()["order"])]
    for name, file in sorted(named, key=lambda each: not each[0].startswith(OWN)):
        yield name, file.get_tensor(name)


def ordered(differing: Sequence[str], phase: str) -> list[str]:
    """The tensors of a phase that differ, as they come to be, without those of later sums, which follow from them."""
    first = min(map(_sum, differing), default=0)
    found = [name for name in differing if _sum(name) == first]
    return found[::-1] if phase == "gradient" else found  # the backward pass comes by the last one first


def _sum(name: str) -> int:
    """Which sum of its step a tensor belongs to."""
    return int(name.partition(", sum ")[2].partition(",")[0] or 0)
