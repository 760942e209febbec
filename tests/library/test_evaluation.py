"""The stage `evaluate`: the metrics of the run, from weights that fit the network."""

import random
from pathlib import Path

import numpy
import pytest
import torch
from conftest import PACKAGE, Trained, python
from safetensors.torch import save_model
from torch import nn

from samebits.base.files import read_json
from samebits.checkpoint.final import load_weights
from samebits.core.errors import UserError
from samebits.core.evaluation import count_batches, evaluating
from samebits.core.ranks import World
from samebits.core.seeds import seed_everything
from samebits.record import names


def test_evaluation_gives_the_metrics_of_the_run(untracked: Trained, prepared: Path):
    done = python("-m", f"{PACKAGE}.evaluate", "--set", f"data.prepared={prepared}", "--out", untracked.out)
    assert done.returncode == 0, done.stderr
    found, metrics = read_json(untracked.out / "evaluation.json"), read_json(untracked.out / names.METRICS)
    assert sum(map(sum, found.pop("confusion"))) == 359
    assert found.pop("weights") == untracked.weights
    assert found == {name: value for name, value in metrics.items() if name != "steps"}


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """Ten samples, whose transform draws from each generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), numpy.random.random(), torch.rand(()).item()], dtype=torch.float64)


def seen(size: int) -> torch.Tensor:
    """All that the ranks of a world of this size see of it, and what their models draw."""
    rows = {}
    for rank in range(size):
        torch.manual_seed(rank)
        with evaluating(nn.Dropout(), Drawing(), 4, 7, World(rank, size, torch.device("cpu"))) as batches:
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
    with evaluating(model, Drawing(), 4, 7, World(0, 1, torch.device("cpu"))) as batches:
        for _ in batches:
            assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    assert drawn() == expected
    with pytest.raises(KeyError), evaluating(model, Drawing(), 4, 7, World(0, 1, torch.device("cpu"))) as batches:
        next(batches)
        raise KeyError
    assert [module.training for module in model.modules()] == modes


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
