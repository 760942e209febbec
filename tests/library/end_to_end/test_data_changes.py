"""Samples that change during a run: refused if the loop changes them, equal if they follow from the epoch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attempt import inside
from loops import Parts, loss_of
from project.config import Config
from support import OURS
from torch import Tensor

import samebits
from samebits.core.errors import UserError
from samebits.core.order import Permutation
from samebits.core.step import Step
from samebits.record import names
from samebits.run import Run

pytestmark = pytest.mark.usefixtures("as_a_stage")
STRENGTH = 0.0


class Noisy:
    """Samples with noise that grows; an epoch has two steps."""

    def __init__(self, per_epoch: float = 0.0) -> None:
        self.strength, self.per_epoch = 0.0, per_epoch
        self.cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        clean = self.cache.setdefault(index, torch.arange(4) / (index + 1))
        strength = self.strength + STRENGTH + self.per_epoch * samebits.item_epoch()
        return {"x": clean + torch.randn(4) * strength, "y": torch.full((1,), index / 100)}


class Collate:
    """Batches with noise."""

    strength = 0.0

    def __call__(self, items: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(items)
        return {**batch, "x": batch["x"] + torch.randn_like(batch["x"]) * self.strength}


class InTurn:
    """An order that begins at the offset in an array, and further on from epoch to epoch."""

    def __init__(self, per_epoch: int = 0) -> None:
        self.offset, self.per_epoch = numpy.zeros(1, dtype=int), per_epoch

    def __call__(self, samples: int, key: int) -> Any:
        return Turned(samples, self.offset + self.per_epoch * samebits.item_epoch(), self.per_epoch)


class Turned:
    """The order of one epoch, which asks for its epoch once more."""

    def __init__(self, samples: int, offset: Any, per_epoch: int) -> None:
        self.samples, self.offset, self.per_epoch = samples, offset, per_epoch

    def items(self, positions: Any) -> Any:
        return (positions + self.offset + self.per_epoch * samebits.item_epoch()) % self.samples


def train(
    config: Config, out: Path, change: Callable[[Step, Noisy, Collate, InTurn], object], workers: int, **sources: Any
) -> bytes:
    """Train for three epochs and return the weights; `change` is the line of the loop that the owner wrote."""
    settings = inside(config, Path(config.data.prepared), workers)
    with Run(OURS, settings, out) as run:
        parts, collate, order = Parts(run), Collate(), sources.get("order", Permutation)
        parts.dataset = train_set = Noisy(sources.get("per_epoch", 0.0))
        unsaved = sources.get("unsaved", ())
        for step in run.steps(
            parts.model, parts.optimizer, train_set, epochs=3, collate=collate, order=order, unsaved=unsaved
        ):
            change(step, train_set, collate, order)
            for batch in step:
                step.backward(loss_of(parts.model, batch))
            parts.optimizer.step()
        run.finish()
    return (out / names.WEIGHTS).read_bytes()


@pytest.fixture
def config_of_data(config: Config, prepared: Path) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"prepared": str(prepared)})})


@pytest.fixture(autouse=True)
def same_strength() -> Iterator[None]:
    yield
    globals()["STRENGTH"] = 0.0


def no_change(*sources: Any) -> None:
    """The line of a loop that changes nothing."""


def of_epoch(step: Step) -> float:
    return 0.1 * int(step.epochs)


CHANGES: dict[str, Callable[[Step, Noisy, Collate, InTurn], object]] = {
    "train_set.strength": lambda step, train_set, collate, order: setattr(train_set, "strength", of_epoch(step)),
    "collate.strength": lambda step, train_set, collate, order: setattr(collate, "strength", of_epoch(step)),
    "test_data_changes.STRENGTH": lambda step, *sources: globals().__setitem__("STRENGTH", of_epoch(step)),
    "order.offset": lambda step, train_set, collate, order: order.offset.__setitem__(0, int(step.epochs)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("path", CHANGES)
def test_change_by_the_loop_is_refused_with_and_without_workers(
    path: str, workers: int, config_of_data: Config, tmp_path: Path
):
    """At the step of the change, so no checkpoint holds what came of it."""
    with pytest.raises(UserError, match=f"^{path}: expected .* The loop changed it, and loader workers have copies"):
        train(config_of_data, tmp_path / "run", CHANGES[path], workers, order=InTurn())
    assert len((tmp_path / "run" / names.METRIC_ROWS).read_bytes().splitlines()) <= 3


def test_samples_that_follow_from_their_epoch_are_equal_with_and_without_workers(
    config_of_data: Config, tmp_path: Path
):
    """The dataset fills its cache in this process or in the workers: that is no change by the loop."""

    def harmless(step: Step, train_set: Noisy, *others: Any) -> None:
        train_set.counted = step.number

    alone = train(config_of_data, tmp_path / "alone", no_change, 0, per_epoch=0.1)
    assert train(config_of_data, tmp_path / "helped", no_change, 2, per_epoch=0.1) == alone
    assert train(config_of_data, tmp_path / "counted", harmless, 0, per_epoch=0.1, unsaved=("counted",)) == alone
    assert train(config_of_data, tmp_path / "constant", no_change, 0) != alone


def test_order_may_follow_from_the_epoch(config_of_data: Config, tmp_path: Path):
    alone = train(config_of_data, tmp_path / "alone", no_change, 0, order=InTurn(5))
    assert train(config_of_data, tmp_path / "helped", no_change, 2, order=InTurn(5)) == alone
    assert train(config_of_data, tmp_path / "constant", no_change, 0, order=InTurn()) != alone


def test_epoch_is_known_only_while_a_sample_is_made():
    with pytest.raises(
        UserError, match=r"^samebits\.item_epoch\(\): no sample is being made; in the loop, step\.epochs"
    ):
        samebits.item_epoch()
