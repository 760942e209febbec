"""A training in which one number is changed by one ULP at a step, and whose weights are kept at some steps.

    python -m samebits.analysis.noise.perturbed FOLDER KIND AT ARGUMENTS

`samebits noise --perturb` starts it; ARGUMENTS are those of `train`. It is the owner's own training with all its flags.
KIND `none` changes nothing: then the weights are those of the honest training. FOLDER gets the weights and a report.
It violates its content address on purpose, so it writes no receipt, and no checkpoint from which one could come.
"""

import copy
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...base.files import write_json
from ...core.batch import tensors_of
from ...core.errors import UserError
from ...core.loop import Tamper
from ...core.observer import Observer, View
from ...core.shards import unsharded
from ...core.trees import copied
from ...run import Added
from .. import child

CHANGED = "perturbed.json"  # the report
CONTROL = "none"  # the kind of change that is none
ROWS = 12  # steps of which something is told


def probes(at: int, of: int) -> list[int]:
    """At most ROWS of the `of` steps: the one before `at`, then from there to the last in roughly geometric strides."""
    room, left = ROWS - bool(at), of - at  # steps
    strides = {round(left ** (place / (room - 1))) - 1 for place in range(room)} if left > room else range(left)
    return [*range(at)[-1:], *sorted(at + stride for stride in strides)]


def nudge(tensor: Tensor) -> dict[str, Any]:
    """Add one ULP to the finite element of largest magnitude, the first of equal ones, and say which it was.

    Raises:
        UserError: no element is finite.
    """
    with torch.no_grad():
        flat = tensor.detach().to("cpu", copy=True).flatten()
        if not flat.isfinite().any():
            raise UserError(f"--perturb: a tensor of shape {tuple(tensor.shape)} has no finite element to change")
        sizes = flat.abs().where(flat.isfinite(), -1)
        place = int((sizes == sizes.max()).nonzero()[0])
        before = flat[place]
        after = next(
            value
            for side in (math.inf, -math.inf)  # the largest number of all has no finite one above it
            if (value := before.nextafter(before.new_tensor(side))).isfinite()
        )
        index = tuple(int(number) for number in np.unravel_index(place, tensor.shape))
        tensor[index] = after.to(tensor.device)
    return {"index": list(index), "before": float(before), "after": float(after), "dtype": str(tensor.dtype)[6:]}


class Report:
    """The report, which grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._facts: dict[str, Any] = {}

    def add(self, **facts: Any) -> None:
        """Write down more."""
        self._facts |= facts
        write_json(self.folder / CHANGED, self._facts)

    def changed(self, name: str, tensor: Tensor) -> None:
        """Change a tensor in place, and write it down."""
        self.add(changed={"tensor": name, **nudge(tensor)})


class Probes(Observer):
    """Keeps the weights after some steps."""

    name = "probes"

    def __init__(self, report: Report, at: int) -> None:
        self._report, self._at = report, at
        self._probes: list[int] = []

    def begin_step(self, view: View) -> None:
        """Refuse a change that would never come."""
        if not self._probes:
            if self._at >= view.of:
                said = f"at most {view.of - 1} wanted: the run has {view.of} steps, counted from 0"
                raise UserError(f"--at {self._at} seen, {said}")
            self._probes = probes(self._at, view.of)
            self._report.add(steps=view.of, probes=self._probes, changed=None)

    def end_step(self, view: View, *counted: Any) -> None:
        """Keep the weights, if this is such a step."""
        if view.step in self._probes:
            kept = {name: copied(unsharded(held)) for name, held in view.weights().items()}
            save_file(kept, self._report.folder / f"{view.step}.safetensors")


class Change(Tamper):
    """The change of one number, at a step."""

    def __init__(self, report: Report, kind: str, at: int) -> None:
        self._report, self._kind, self._at, self._is_made = report, kind, at, False

    def _is_due(self, kind: str, step: int) -> bool:
        due = (kind, step) == (self._kind, self._at) and not self._is_made
        self._is_made |= due
        return due

    def weights(self, step: int, model: nn.Module) -> None:
        """Change a weight."""
        if self._is_due("weight", step):
            self._report.changed(*_first(model, "weight"))

    def batch(self, step: int, leaf: int, batch: Any) -> Any:
        """Change the first micro-batch: a copy, for the dataset may hand out what it keeps."""
        if not self._is_due("batch", step):
            return batch
        batch = copy.deepcopy(batch)
        for number, tensor in enumerate(tensors_of(batch)):
            if tensor.is_floating_point() and tensor.numel():
                self._report.changed(f"tensor {number} of the batch", tensor)
                return batch
        raise UserError("--perturb batch: no tensor of the batch holds floating-point numbers; take weight or gradient")

    def gradients(self, step: int, model: nn.Module) -> None:
        """Change a gradient."""
        if self._is_due("gradient", step):
            name, parameter = _first(model, "gradient")
            assert parameter.grad is not None
            self._report.changed(f"the gradient of {name}", parameter.grad)


def _first(model: nn.Module, kind: str) -> tuple[str, nn.Parameter]:
    for name, parameter in model.named_parameters():
        held = parameter.grad if kind == "gradient" else parameter
        if held is not None and held.is_floating_point() and held.numel():
            return name, parameter
    raise UserError(f"--perturb {kind}: no parameter of the model has one of floating-point numbers")


def _run(folder: str, kind: str, at: str, *arguments: str) -> None:
    report = Report(Path(folder))
    added = Added([Probes(report, int(at))], Change(report, kind, int(at)))
    child.train(added, *arguments)


if __name__ == "__main__":
    _run(*sys.argv[1:])
