"""The stage `evaluate`: the metrics of the run, from weights that fit the network."""

from pathlib import Path

import pytest
import torch
from conftest import PACKAGE, Trained, python
from project.repro.errors import Refused
from project.repro.files import read_json
from project.repro.records import names
from project.repro.run import load_weights
from safetensors.torch import save_model
from torch import nn


def test_evaluation_gives_the_metrics_of_the_run(untracked: Trained, prepared: Path):
    done = python("-m", f"{PACKAGE}.evaluate", "--set", f"data.prepared={prepared}", "--out", untracked.out)
    assert done.returncode == 0, done.stderr
    found, metrics = read_json(untracked.out / "evaluation.json"), read_json(untracked.out / names.METRICS)
    assert sum(map(sum, found.pop("confusion"))) == 359
    assert found == {name: value for name, value in metrics.items() if name != "steps"}


def test_weights_of_a_run_are_loaded(tmp_path: Path):
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_model(one, str(tmp_path / names.WEIGHTS))
    load_weights(other, tmp_path)
    assert torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


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
    with pytest.raises(Refused) as refused:
        load_weights(nn.Linear(3, 2), tmp_path)
    told = str(refused.value)
    assert told.startswith(f"{path}: ") and "\n" not in told and "rain" in told and len(told) < len(str(path)) + 300
