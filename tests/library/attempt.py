"""An attempt at a run inside this process: its settings, the crash that cuts it short, and the result."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from project.config import Config

from samebits.base.files import read_json
from samebits.checkpoint import checkpoint
from samebits.core.state import Snapshot, State
from samebits.record import names

STEPS = 23  # of one epoch

Finish = Callable[..., None]  # the type of the `finish` fixture


def result(out: Path) -> dict[str, Any]:
    """All that must not depend on kills, resumes and world sizes."""
    last = checkpoint.found(out / names.CHECKPOINTS)[-1]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "optimizer": hashlib.sha256((last / "optimizer.safetensors").read_bytes()).hexdigest(),
        "last checkpoint": last.name,
        "rows": [(row["step"], row["metrics"]) for row in rows],
        "trace": hashlib.sha256((out / "trace" / "steps.bin").read_bytes()).hexdigest(),
        "status": read_json(out / "run.json")["status"],
    }


def origin(out: Path) -> checkpoint.Origin:
    """Whose checkpoints the run in `out` makes."""
    address, environment = (read_json(out / name) for name in (names.ADDRESS, names.ENVIRONMENT))
    return checkpoint.Origin(address["address"], environment["environment"])


def inside(config: Config, prepared: Path, workers: int = 1, **checkpoints: Any) -> Config:
    """The settings of `start`, for a training inside this process.

    With a loader worker: without one, each sample seeds this process's generator, which could hide a missing seed.
    """
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"prepared": str(prepared)}),
            "train": config.train.model_copy(update={"epochs": 1}),
            "tracking": config.tracking.model_copy(update={"enabled": False}),
            "loader": config.loader.model_copy(update={"workers": workers}),
            "checkpoint": config.checkpoint.model_copy(update=checkpoints),
        }
    )


class Crash(BaseException):
    """Stands for the end of the process: nothing that handles errors may run after it."""


@contextmanager
def crash_after(last: int) -> Iterator[None]:
    """A training inside this process crashes at its first checkpoint after this step."""
    look = State.look

    def crash(state: State, step: int) -> Snapshot:
        if step > last:
            raise Crash
        return look(state, step)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(State, "look", crash)
        yield
