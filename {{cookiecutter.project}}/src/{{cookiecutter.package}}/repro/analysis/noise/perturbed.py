"""A training in which one number is changed by one ULP at a step, and whose weights are kept at some steps.

    python -m <package>.repro.analysis.noise.perturbed FOLDER KIND AT ARGUMENTS

`repro noise --perturb` starts it; ARGUMENTS are those of `train`. It is the owner's own training with all its switches.
KIND `none` changes nothing: then the weights are those of the honest training. FOLDER gets the weights and a report.
It violates its content address on purpose, so it writes no receipt, and no checkpoint from which one could come.
"""

import copy
import math
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ... import run
from ...base.files import write_json
from ...checkpoint.saver import Saver
from ...core.batch import tensors_of
from ...core.errors import Refused
from ...core.shards import is_extra
from ...core.step import Compute, Step, Training
from ...core.trees import copied
from ...record import receipt
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
        Refused: no element is finite.
    """
    with torch.no_grad():
        flat = tensor.detach().to("cpu", copy=True).flatten()
        if not flat.isfinite().any():
            raise Refused(f"--perturb: a tensor of shape {tuple(tensor.shape)} has no finite element to change")
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


class Perturbed(Step):
    """A step of such a training."""

    folder: Path
    kind: str
    at: int
    report: dict[str, Any]

    def __init__(self, training: Training, number: int, of: int) -> None:
        super().__init__(training, number, of)
        if not self.report:
            if self.at >= of:
                raise Refused(f"--at {self.at} seen, at most {of - 1} wanted: the run has {of} steps, counted from 0")
            self._tell(steps=of, probes=probes(self.at, of), changed=None)

    def backward(self, compute: Compute) -> Tensor:
        """As every step has it, with the change before or within."""
        change: Callable[[Training], None] | None = CHANGES[self.kind]
        if change and self.number == self.at and not self._begun:
            with self._training.operations.paused():  # the watch of the first step is to see the owner's alone
                change(self._training)
        return super().backward(compute)

    def require_whole(self) -> None:
        """As every step has it; then the weights are kept."""
        super().require_whole()
        if self.number in self.report["probes"]:
            state = self._training.model.state_dict()
            weights = {name: copied(held) for name, held in state.items() if not is_extra(name)}
            save_file(weights, self.folder / f"{self.number}.safetensors")

    @classmethod
    def _tell(cls, **facts: Any) -> None:
        cls.report = cls.report | facts
        write_json(cls.folder / CHANGED, cls.report)

    @classmethod
    def changed(cls, name: str, tensor: Tensor) -> None:
        """Change a tensor in place, and tell it."""
        cls._tell(changed={"tensor": name, **nudge(tensor)})


def _batch(training: Training) -> None:
    """Change the batch of the first micro-batch: a copy, for the dataset may hand out what it keeps."""
    batch = copy.deepcopy(next(training.batches))
    training.batches = chain([batch], training.batches)
    for number, tensor in enumerate(tensors_of(batch)):
        if tensor.is_floating_point() and tensor.numel():
            return Perturbed.changed(f"tensor {number} of the batch", tensor)
    raise Refused("--perturb batch: no tensor of the batch holds floating-point numbers; take weight or gradient")


def _weight(training: Training) -> None:
    name, parameter = _first(training.model, "weight")
    Perturbed.changed(name, parameter)


def _gradient(training: Training) -> None:
    gradients, reduce = training.gradients, training.gradients.reduce

    def reduced() -> Tensor:
        del gradients.reduce  # the next step's is as it was
        loss = reduce()
        with training.operations.paused():
            name, parameter = _first(training.model, "gradient")
            assert parameter.grad is not None
            Perturbed.changed(f"the gradient of {name}", parameter.grad)
        return loss

    gradients.reduce = reduced  # type: ignore[method-assign]


def _first(model: nn.Module, kind: str) -> tuple[str, nn.Parameter]:
    for name, parameter in model.named_parameters():
        held = parameter.grad if kind == "gradient" else parameter
        if held is not None and held.is_floating_point() and held.numel():
            return name, parameter
    raise Refused(f"--perturb {kind}: no parameter of the model has one of floating-point numbers")


CHANGES: dict[str, Callable[[Training], None] | None] = {
    CONTROL: None,
    "batch": _batch,
    "weight": _weight,
    "gradient": _gradient,
}


def _no_receipt(folder: Path, receipt: dict[str, Any]) -> str:
    return "none"


def _run(package: str, folder: str, kind: str, at: str, *arguments: str) -> None:
    Perturbed.folder, Perturbed.kind, Perturbed.at, Perturbed.report = Path(folder), kind, int(at), {}
    run.Step = Perturbed  # type: ignore[attr-defined]
    receipt.write = _no_receipt
    Saver.save = lambda self, *state: None  # type: ignore[method-assign]
    child.train(package, *arguments)


if __name__ == "__main__":
    _run(__package__.partition(".")[0], *sys.argv[1:])
