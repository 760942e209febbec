"""The stage `evaluate`: the metrics of the run, from weights that fit the network."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_model
from torch import nn
from warm import PATIENCE

from samebits.checkpoint.final import load_weights
from samebits.core.errors import UserError
from samebits.core.evaluation import count_batches, evaluating, sums
from samebits.core.options import Options, Parallel
from samebits.core.ranks import World
from samebits.core.sampling import Loading
from samebits.core.seeds import seed_everything
from samebits.record import names


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """Ten samples, whose transform draws from each generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), numpy.random.random(), torch.rand(()).item()], dtype=torch.float64)


def loading(world: World | None = None) -> Loading:
    """The way in which samples are loaded, seeded by 7."""
    return Loading(Options(7, Parallel(global_batch=8, micro_batches=8)), world or World(0, 1, torch.device("cpu")))


def seen(size: int) -> torch.Tensor:
    """All that the ranks of a world of this size see of it, and what their models draw."""
    rows = {}
    for rank in range(size):
        torch.manual_seed(rank)
        with evaluating(nn.Dropout(), Drawing(), 4, loading(World(rank, size, torch.device("cpu")))) as batches:
            rows |= {number: torch.cat([batch, torch.rand(len(batch), 1)], 1) for number, batch in batches}
    return torch.cat([rows[number] for number in range(count_batches(Drawing(), 4))])


def test_draws_of_an_evaluation_do_not_depend_on_the_world_size():
    alone = seen(1)
    assert alone[:, 0].tolist() == list(range(10)) and len(alone[:, 1:].unique()) == 40
    for size in (2, 3, 5):
        assert torch.equal(seen(size), alone)


def test_evaluation_leaves_modes_and_generators_as_they_were():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1)))
    model[1].eval()  # frozen, as people do with the statistics of a pretrained network
    model[2][1].eval()
    modes = [module.training for module in model.modules()]

    def drawn() -> list[float]:
        return [random.random(), numpy.random.random(), torch.rand(()).item()]

    seed_everything(5)
    expected = drawn()
    seed_everything(5)
    with evaluating(model, Drawing(), 4, loading()) as batches:
        for _ in batches:
            assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    assert drawn() == expected
    with pytest.raises(KeyError), evaluating(model, Drawing(), 4, loading()) as batches:
        next(batches)
        raise KeyError
    assert [module.training for module in model.modules()] == modes


# ---- sums


class Shared(World):
    """One of several ranks that are threads of this process."""

    meeting: Barrier
    given: list[Any]

    def _all(self, value: Any) -> list[Any]:
        self.given[self.rank] = value
        self.meeting.wait()
        values = [*self.given]
        self.meeting.wait()
        return values

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up in place over the ranks."""
        tensor.copy_(torch.stack([each.clone() for each in self._all(tensor.clone())]).sum(0))

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's."""
        return self._all(value)[0]


Measure = Callable[[nn.Module, torch.Tensor], Any]


def summed(measure: Measure, size: int = 1, samples: int = 10) -> list[dict[str, torch.Tensor]]:
    """What each of so many ranks gets."""
    dataset = [torch.tensor([n, 1 / (n + 1), n % 3], dtype=torch.float32) for n in range(samples)]
    meeting, given = Barrier(size, timeout=PATIENCE), [None] * size

    def one(rank: int) -> dict[str, torch.Tensor]:
        world = Shared(rank, size, torch.device("cpu"))
        object.__setattr__(world, "meeting", meeting)
        object.__setattr__(world, "given", given)
        return sums(measure, nn.Identity(), dataset, 4, loading(world))

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(one, range(size))]


def measured(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """A count, a truth for each class, a number, and numbers for each class."""
    classes = batch[:, 2].long().bincount(minlength=3)
    return {"count": torch.tensor(len(batch)), "any": classes > 0, "sum": batch[:, 1].sum(), "by class": classes * 0.1}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_do_not_depend_on_the_world_size(size: int):
    """On five ranks two have no batch."""
    (alone,) = summed(measured)
    assert {name: (value.dtype, value.shape) for name, value in alone.items()} == {
        "count": (torch.int64, ()),
        "any": (torch.int64, (3,)),
        "sum": (torch.float64, ()),
        "by class": (torch.float64, (3,)),
    }
    assert (alone["count"].item(), alone["any"].tolist()) == (10, [3, 2, 3])
    for rank in summed(measured, size):
        assert rank.keys() == alone.keys() and all(torch.equal(rank[name], alone[name]) for name in alone)


def test_number_of_each_batch_is_added_in_float64():
    (alone,) = summed(lambda model, batch: {"x": torch.tensor(2.0**-30 if batch[0, 0] else 1.0)})
    assert alone["x"].item() == 1 + 2 * 2.0**-30


ODD: dict[str, tuple[Measure, str]] = {
    "a number": (lambda model, batch: 3.0, "measure(model, batch) returned float, a dict of tensors by name wanted"),
    "numbers": (lambda model, batch: {"loss": 3.0}, "returned dict, a dict of tensors by name wanted"),
    "other names": (lambda model, batch: {f"at {batch[0, 0]}": batch.sum()}, "the names of before wanted: ['at 0.0']"),
    "one per sample": (
        lambda model, batch: {"loss": batch[:, 1]},
        "returned loss as torch.float32 (2,), torch.float64",
    ),
    "another type": (lambda model, batch: {"n": torch.tensor(1 if batch[0, 0] else 1.0)}, "n as torch.int64 ()"),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_cannot_be_added_up_is_refused_in_a_line(odd: str):
    measure, said = ODD[odd]
    with pytest.raises(UserError) as refused:
        summed(measure)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_dataset_without_samples_is_refused():
    with pytest.raises(UserError, match="the dataset to evaluate has no sample, one at least wanted"):
        summed(measured, samples=0)


FAULTS = {
    "missing": lambda path: path.unlink(),
    "of another shape": lambda path: save_model(nn.Linear(4, 2), str(path)),
    "of another network": lambda path: save_model(nn.Sequential(nn.Linear(3, 2)), str(path)),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_are_refused_in_a_line(fault: str, tmp_path: Path):
    path = tmp_path / names.WEIGHTS
    save_model(nn.Linear(3, 2), str(path))
    FAULTS[fault](path)
    with pytest.raises(UserError) as refused:
        load_weights(nn.Linear(3, 2), tmp_path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ") and "rain" in message
    assert "\n" not in message and len(message) < len(str(path)) + 300
