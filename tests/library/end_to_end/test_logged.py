"""The model in MLflow: a LoggedModel that loads where the project is not, with the run's very weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt import inside
from clone import git
from project.config import Config
from project.model import build
from safetensors.torch import load_file
from server import Proxy, Server, until
from support import OURS, PACKAGE, PROJECT, Trained, python
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from warm import Warm

from samebits.base.files import read_json, write_json
from samebits.base.project import Project
from samebits.core import ARITHMETIC
from samebits.record import code_state, names
from samebits.run import Run
from samebits.tracking import logged, tracking

pytestmark = pytest.mark.usefixtures("address")

LOAD = """
import hashlib, json, os, sys
import mlflow, numpy, torch
from safetensors.torch import save_file

mlflow.set_tracking_uri(sys.argv[1])
(model,) = mlflow.MlflowClient().search_logged_models(sys.argv[2].split(), f"source_run_id = '{sys.argv[3]}'")
network = mlflow.pytorch.load_model(f"models:/{model.model_id}")
save_file(network.state_dict(), sys.argv[4])
torch.manual_seed(0)
images = torch.rand(5, 1, 8, 8)
served = mlflow.pyfunc.load_model(f"runs:/{sys.argv[3]}/model")
try:
    served.predict(numpy.zeros((2, 1, 8, 7), "float32"))
    refused = False
except mlflow.exceptions.MlflowException as error:
    refused = "Shape" in str(error)
print(json.dumps({
    "file": sys.modules[type(network).__module__].__file__,
    "logits": network(images).tolist(),
    "served": served.predict(images.numpy()).tolist(),
    "signature": served.metadata.signature.to_dict(),
    "tags": model.tags,
    "refused": refused,
    "training": network.training,
}))
"""


def test_model_loads_where_the_project_is_not(server: Server, tracked: Trained, config: Config, tmp_path: Path):
    state = tracking.read_state(tracked.out)
    requested = server.uri, state["experiment"], state["run"], str(tmp_path / "weights")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *requested], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    assert f"/{names.CODE}/{PACKAGE}/" in found["file"]
    wanted, loaded = load_file(tracked.out / names.WEIGHTS), load_file(tmp_path / "weights")
    assert wanted.keys() == loaded.keys() and all(torch.equal(wanted[name], loaded[name]) for name in wanted)
    model = build(config).eval()
    model.load_state_dict(wanted)
    torch.manual_seed(0)
    logits = model(torch.rand(5, 1, 8, 8)).tolist()
    assert found["logits"] == logits and found["served"] == logits and not found["training"]
    assert found["refused"] and found["tags"]["repro.weights"] == tracked.weights
    assert found["tags"]["repro.receipt"] == read_json(tracked.out / names.RUN)["tags"]["repro.receipt"]
    tensor = json.loads(found["signature"]["inputs"])[0]["tensor-spec"]
    assert tensor == {"dtype": "float32", "shape": [-1, 1, 8, 8]}


def test_requirements_are_the_locks_of_the_environment(server: Server, tracked: Trained):
    found = {path.read_text() for path in (server.folder / "artifacts").rglob("requirements.txt")}  # of each model
    locks = [(PROJECT / "requirements" / name).read_text() for name in ("torch-cpu.txt", "train-cpu.txt", "run.txt")]
    assert found == {"".join(locks)}


def test_older_server_gets_all_but_the_model(server: Server, tracked: Trained, tmp_path: Path, proxy: Proxy):
    out = Path(shutil.copytree(tracked.out, tmp_path / "run"))
    (out / names.UPLOAD).unlink()
    write_json(out / names.RUN, read_json(out / names.RUN) | {"id": "0" * 32})
    proxy.unknown = "/logged-models"  # which MLflow 2 does not know
    done = python("-m", "samebits", "sync", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("(without the model: a server of MLflow 3 is wanted)")
    content = server.content(out)
    assert content["runs"][0][0] == "FINISHED" and content["models"] == []


def test_system_metrics_are_measured_where_that_is_asked(server: Server, tmp_path: Path, prepared: Path):
    from test_tracking import said, started

    out = tmp_path / "run"
    query = "SELECT count(*) FROM metrics WHERE run_uuid = ? AND key LIKE 'system/cpu%'"
    with started(out, prepared, "tracking.system_seconds=1", uri=server.uri) as process:
        process.send_signal(signal.SIGSTOP)
        (run,) = until(lambda: server.runs_of(out))
        until(lambda: server.rows(query, run)[0][0])
        process.send_signal(signal.SIGCONT)
        assert (process.wait(), said(out)[1]) == (0, ""), said(out)
    assert server.content(out)["runs"][0][0] == "FINISHED"


# ---- without a server


def test_code_has_the_same_bytes_always(tmp_path: Path):
    for name in ("one", "other"):
        logged.write_code(OURS, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    with zipfile.ZipFile(tmp_path / "one") as archive:
        assert archive.read(f"{OURS.name}/model.py") == (OURS.package / "model.py").read_bytes()


def test_model_and_core_are_imported_from_the_code(tmp_path: Path):
    """A file of the library that is not Python, too, is read from inside the archive."""
    logged.write_code(OURS, tmp_path / "code.zip")
    script = f"import {OURS.name}.model, samebits.core; print(samebits.core.ARITHMETIC, samebits.core.__file__)"
    ran = python("-c", script, env={"PYTHONPATH": str(tmp_path / "code.zip")})
    assert ran.stdout == f"{ARITHMETIC} {tmp_path / 'code.zip' / 'samebits' / 'core' / '__init__.py'}\n", ran.stderr


def test_code_goes_without_what_git_ignores_and_what_looks_like_a_secret(tmp_path: Path):
    package = tmp_path / "own" / "src" / "own"
    package.mkdir(parents=True)
    for name in ("model.py", "tokens.py", "notes.txt", "sub/ignored.py", "sub/kept.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("x = 1\n")
    library = tmp_path / "own" / "vendor" / "samebits"
    library.mkdir(parents=True)
    (library / "run.py").touch()
    (package / "tokens.py").write_text(f"TOKEN = 'ghp_{'a1B2' * 9}'\n")
    (tmp_path / "own" / ".gitignore").write_text("ignored.py\n")

    def packed() -> set[str]:
        logged.write_code(Project(package), tmp_path / "code.zip")
        with zipfile.ZipFile(tmp_path / "code.zip") as archive:
            return set(archive.namelist())

    public = {"own/model.py", "own/notes.txt", "own/sub/kept.py", "samebits/run.py"}
    assert packed() == public | {"own/sub/ignored.py"}  # no repository: nothing is ignored
    git(tmp_path / "own", "init", "--quiet")
    assert packed() == public
    (package / "sub" / "ignored.py").unlink()
    assert packed() == public


def test_class_of_the_loops_own_file_goes_along(tmp_path: Path):
    """There it is `__main__`'s, which nobody can import."""
    write = """
import sys
from pathlib import Path
from torch import nn
from samebits.base.project import Project
from samebits.core import ARITHMETIC
from samebits.tracking import logged

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

assert logged.write(Net(2, 3), Project.at(Path.cwd()), Path(sys.argv[1])) is None
"""
    loop, said = tmp_path / "loop.py", tmp_path / "said"
    loop.write_text(write)
    assert Warm(str(tmp_path), out=said, err=said, script=loop).wait() == 0, said.read_text()
    assert type(torch.load(tmp_path / names.PICKLED, weights_only=False)).__name__ == "Net"


def test_model_that_cannot_be_pickled_is_told_and_leaves_nothing(tmp_path: Path):
    message = logged.write(weight_norm(nn.Linear(2, 2)), OURS, tmp_path)
    assert message and "\n" not in message and "set tracking.model=false" in message and "ParametrizedLinear" in message
    assert list(tmp_path.iterdir()) == []


def test_nothing_goes_where_git_cannot_say_what_it_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code_state, "is_repository", lambda project: True)
    (tmp_path / "src" / "own").mkdir(parents=True)  # of no repository, so that `git check-ignore` fails
    (tmp_path / "out").mkdir()
    message = logged.write(nn.Linear(2, 2), Project(tmp_path / "src" / "own"), tmp_path / "out")
    assert message and "check-ignore" in message and list((tmp_path / "out").iterdir()) == []


def test_tied_frozen_and_integer_tensors_stay_what_they_are(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert logged.write(model, OURS, tmp_path) is None
    found = torch.load(tmp_path / names.PICKLED, weights_only=False)
    assert found[1].weight is found[0].weight and not found[0].bias.requires_grad and found[1].bias.requires_grad
    wanted = model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items())


class Odd(nn.Module):
    """Takes a tensor, a flag and a mapping, and gives a mapping."""

    def forward(self, x: Tensor, flag: bool = True, **more: Tensor) -> dict[str, Any]:
        return {"sum": x.sum() + more["y"].sum(), "twice": 2 * x, "flag": flag}


def test_shapes_name_tensors_and_leave_the_batch_open():
    model = Odd()
    shapes = logged.Shapes(model, 4, print)
    model(torch.zeros(4, 2, dtype=torch.bfloat16), y=torch.zeros(3))
    assert shapes.seen == {
        "inputs": [{"name": "x", "dtype": "bfloat16", "shape": [-1, 2]}],
        "outputs": [
            {"name": "sum", "dtype": "float32", "shape": []},
            {"name": "twice", "dtype": "bfloat16", "shape": [-1, 2]},
        ],
    }
    model(torch.zeros(9), y=torch.zeros(3))
    assert shapes.seen["inputs"][0]["shape"] == [-1, 2]  # the first call decides


def test_run_leaves_no_hook_on_the_model(config: Config, prepared: Path, tmp_path: Path):
    """So it can be pickled, and trained by another run."""
    from project import data

    model = build(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    requested = inside(config, prepared, 0)
    requested = requested.model_copy(update={"trace": config.trace.model_copy(update={"level": "tensor"})})
    train_set, _ = data.load(requested)
    for name in ("one", "other"):
        with Run(OURS, requested, tmp_path / name) as run:
            for step in run.steps(model, optimizer, train_set, steps=2):
                for images, _ in step:
                    step.backward(model(images).square().mean())
                optimizer.step()
            run.finish()
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not [p for p in model.parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
