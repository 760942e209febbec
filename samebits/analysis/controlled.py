"""Trainings that must differ from the one that they are compared with, or that show by what they would.

    python -m samebits.analysis.controlled seen REPORT ARGUMENTS    writes down what of the first step the seed reaches
    python -m samebits.analysis.controlled taken REPORT ARGUMENTS   goes on from a state of which one tensor is zero

`samebits verify` starts them; ARGUMENTS are those of `train`.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from ..base.files import write_json
from ..core.digest import held_digests
from ..core.generators import preserved, seeded
from ..core.loop import Tamper
from ..core.observer import Observer, View
from ..core.plan import Indexed
from ..core.seeds import derive, seed_everything
from ..run import Added
from . import child

ITEMS = 16  # of the dataset that are made
GENERATORS: dict[str, Callable[[], bytes]] = {
    "python": lambda: repr(random.getstate()).encode(),
    "numpy": lambda: repr(numpy.random.get_state(legacy=False)["state"]["key"].tobytes()).encode(),
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "cuda": lambda: torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b"",
}


def states() -> dict[str, str]:
    """A digest of the state of each global generator."""
    return {name: hashlib.sha256(state()).hexdigest() for name, state in GENERATORS.items()}


class Report:
    """What is seen of each use of the seed: its value, which generators it drew from, and how these were left."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, dict[str, Any]()

    def add(self, use: str, value: Any, drawn: Sequence[str], left: Any) -> None:
        """Write down more."""
        self._seen[use] = {"value": value, "drawn": [*drawn], "left": left}
        write_json(self._path, self._seen)


class Recorded:
    """A dataset that writes down which samples are asked for first."""

    def __init__(self, dataset: Indexed, report: Report) -> None:
        self._dataset, self._report, self._order = dataset, report, list[int]()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if len(self._order) < ITEMS:
            self._order.append(index)
            self._report.add("order", self._order, [], {})
        return self._dataset[index]


def look_at_items(dataset: Indexed, seed: int, report: Report) -> None:
    """Make some items, seeded as those of the first epoch, and write down whether they draw."""
    drawn, left = set[str](), []
    with preserved():
        for index in range(min(ITEMS, len(dataset))):
            before = dict[str, str]()

            def make(index: int = index, before: dict[str, str] = before) -> None:
                before |= states()
                dataset[index]

            seeded(derive(seed, "sample", 0, index), make)
            after = states()
            drawn |= {name for name in after if after[name] != before[name]}
            left.append(after)
    report.add("augmentation", None, sorted(drawn), {name: [each[name] for each in left] for name in GENERATORS})


class Seen(Observer):
    """Writes down the weights before the first step, and whether the model draws in it."""

    name = "seed"

    def __init__(self, report: Report) -> None:
        self._report, self._is_done = report, False

    def begin_step(self, view: View) -> None:
        """The model is built, and nothing is trained."""
        if not self._is_done:
            (digest,) = held_digests([list(view.weights().values())])
            self._report.add("initial weights", int(digest), [*GENERATORS], states())

    def gradients(self, view: View) -> None:
        """The last micro-batch has been seen by the model, and nobody has seeded since."""
        if self._is_done:
            return
        self._is_done, left, loop = True, states(), view._loop
        with preserved():
            fresh = []
            for leaf in range(loop.plan.micro_batches):
                seed_everything(derive(loop.options.seed, "micro-batch", view.step, leaf))
                fresh.append(states())
        drawn = [name for name in GENERATORS if all(each[name] != left[name] for each in fresh)]
        self._report.add("dropout", None, drawn, left)


class Taken(Tamper):
    """Zeroes the first weight that is not zero, once."""

    def __init__(self) -> None:
        self._is_done = False

    def weights(self, step: int, model: nn.Module) -> None:
        """Before the first step."""
        if self._is_done:
            return
        self._is_done = True
        with torch.no_grad():
            next(weight for weight in model.parameters() if weight.count_nonzero()).zero_()


def _run(kind: str, path: str, *arguments: str) -> None:
    if kind == "taken":
        return child.train(Added(tamper=Taken()), *arguments)
    report = Report(Path(path))

    def recorded(dataset: Indexed, seed: int) -> Indexed:
        look_at_items(dataset, seed, report)
        return Recorded(dataset, report)

    return child.train(Added(observers=[Seen(report)], dataset=recorded), *arguments)


if __name__ == "__main__":
    _run(*sys.argv[1:])
