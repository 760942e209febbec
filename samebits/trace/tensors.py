"""The tensors of one step, kept whole so that two runs can be compared by value."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


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

    def save(self) -> None:
        """Write down all that was taken in."""
        kept = {name: value.contiguous() for name, value in self._tensors.items()}
        save_file(kept, self.path, {"order": json.dumps(list(kept))})
        self._tensors = {}
