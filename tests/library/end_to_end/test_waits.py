"""How often a step waits for a GPU: at each reading of a tensor. A CPU can count them."""

import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt import inside
from project.config import Config
from support import PACKAGE, train_here
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samebits.core.step import Step
from samebits.run import Run

READ = {Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__}
SENT = {torch.tensor, torch.as_tensor}  # which wait as well, where they are given a device
COUNTED = 6  # a step in which nothing is due
ALWAYS = {
    "finite.py": 1,  # whether the gradient is finite, before the update
    "ranks.py": 1,  # the sums over the ranks, and with them the loss and the norm
    "trace.py": 1,  # digests of the step before: right after the others, so nothing is left to wait for
}
backward = Step.backward


class Waits(TorchFunctionMode):
    """Counts them by the file of the package, or of the library, that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.found = False, Counter[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked, and note who asks."""
        kwargs = kwargs or {}
        if self.counts and (function in READ or (function in SENT and "device" in kwargs)):
            files = [Path(frame.filename) for frame in traceback.extract_stack()]
            files = [file for file in files if {PACKAGE, "samebits"} & {*file.parts}]
            self.found[files[-1].name] += 1
        return function(*args, **kwargs)


def read_twice(self: Step, loss: Tensor) -> None:
    """A loop that looks at each loss: a planted fault."""
    assert float(loss.detach()) > 0 and loss.item() > 0
    backward(self, loss)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "found"),
    [(backward, ALWAYS), (read_twice, ALWAYS | {"train.py": 16})],
    ids=["shipped", "planted"],
)
def test_step_waits_once_beside_the_reading_of_its_loss(
    function: Any,
    found: dict[str, int],
    config: Config,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    waits, steps = Waits(), Run.steps

    def counted(*given: Any, **more: Any) -> Iterator[Step]:
        for step in steps(*given, **more):
            waits.counts = step.number == COUNTED
            yield step

    monkeypatch.setattr(Run, "steps", counted)
    monkeypatch.setattr(Step, "backward", function)
    with waits:
        train_here(inside(config, prepared), tmp_path / "run")
    assert waits.found == found
