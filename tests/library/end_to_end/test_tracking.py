"""Tracking against a real MLflow server: complete, and never in the way of the training."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path

import pytest
from clone import verb
from project.config import Config
from server import Server, assert_complete, logged, until
from support import PROJECT, WORD, Trained, training
from warm import PATIENCE, Warm

from samebits.address.manifest import sha256_file
from samebits.base.files import read_json
from samebits.record import names
from samebits.tracking import tracking
from samebits.tracking.follower import Follower

pytestmark = pytest.mark.usefixtures("address")
LOCKS = PROJECT / "requirements"

# ---- what a tracked run leaves behind


def test_one_training_is_one_complete_run_with_each_step_once(server: Server, tracked: Trained, config: Config):
    assert_complete(server, tracked.out)
    assert {key for key, _ in server.content(tracked.out)["params"]} == set(config.flat())
    steps = read_json(tracked.out / names.METRICS)["steps"]
    losses = [step for key, _, _, step, _ in server.content(tracked.out)["metrics"] if key == "loss"]
    assert losses and sorted(losses) == list(range(int(steps)))


def test_tags_name_what_was_asked_for_and_what_came_out(server: Server, tracked: Trained):
    tags = dict(server.content(tracked.out)["tags"])
    address = read_json(tracked.out / names.ADDRESS)
    environment = read_json(tracked.out / names.ENVIRONMENT)
    wanted = {
        "repro.address": address["address"],
        "repro.data": address["parts"]["data"],
        "repro.lock": address["parts"]["lock"],
        "repro.environment": environment["environment"],
        "repro.weights": tracked.weights,
    }
    assert {name: tags[name] for name in wanted} == wanted
    assert {"repro.commit", "repro.dirty", "repro.image", "repro.run"} <= set(tags)
    columns = {
        "mlflow.source.git.commit": tags["repro.commit"],
        "mlflow.source.name": "samebits train",
        "mlflow.runName": f"train {address['address'][:8]} seed 0",
        "mlflow.user": getuser(),
    }
    assert {name: tags.get(name, "None") for name in columns} == columns


def test_artifacts_are_what_the_run_left_and_the_locks(server: Server, tracked: Trained):
    found = {name: sha256_file(path) for name, path in server.artifacts(tracked.out).items()}
    files = (names.ADDRESS, names.ENVIRONMENT, names.METRICS, names.CURVES, names.WEIGHTS, names.RECEIPT)
    files += ("trace/rank0000.jsonl", "trace/steps.bin")
    wanted = {name: sha256_file(tracked.out / name) for name in files}
    locks = LOCKS.glob("*.txt")
    assert found == wanted | {f"requirements/{path.name}": sha256_file(path) for path in locks}
    assert len(found) >= 7


def test_run_is_compared_by_its_id(server: Server, tracked: Trained, monkeypatch: pytest.MonkeyPatch):
    run = tracking.read_state(tracked.out)["run"]
    monkeypatch.chdir(PROJECT)
    done = verb("diff", run, tracked.out)
    assert (done.exit_code, done.stderr) == (0, "") and "have equal bits in all 23 steps, trace root " in done.stdout
    done = verb("diff", "0" * 32, tracked.out)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and "0" * 32 in done.stderr


def test_dataset_is_an_input_with_its_digest(server: Server, tracked: Trained, config: Config):
    ((name, digest, profile),) = server.content(tracked.out)["datasets"]
    whole = read_json(tracked.out / names.ADDRESS)["parts"]["data"]
    assert name == Path(config.data.raw).name and digest == whole[:36]
    assert json.loads(profile)["digest"] == whole


def test_environment_wins_over_params_yaml(server: Server, tracked: Trained, monkeypatch: pytest.MonkeyPatch):
    assert not (tracked.out.parent / "elsewhere.db").exists()
    assert f"tracked    {server.uri}/#/experiments/" in tracked.done.stdout
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking.address_of("") == "sqlite:///mlflow.db"
    assert tracking.address_of("http://configured") == "http://configured"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert tracking.address_of("http://configured") == tracking.address_of("") == "http://environment"


def test_password_of_the_server_is_written_nowhere(server: Server, tracked: Trained):
    assert WORD not in tracked.done.stdout + tracked.done.stderr
    for folder in (tracked.out, server.folder):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files and [path for path in files if WORD.encode() in path.read_bytes()] == []


def test_tracking_does_not_change_a_bit(tracked: Trained, untracked: Trained, offline: Trained):
    assert tracked.weights == untracked.weights == offline.weights
    address = [read_json(each.out / names.ADDRESS) for each in (tracked, untracked, offline)]
    assert address[0] == address[1] == address[2]


# ---- never in the way


def test_server_that_is_down_costs_a_warning(offline: Trained):
    assert (offline.done.returncode, offline.done.stderr) == (0, "")
    tracked = [line for line in offline.done.stdout.splitlines() if line.startswith("tracked")]
    assert len(tracked) == 1 and "tracking incomplete (" in tracked[0]
    assert f"the record is kept, upload it with: samebits sync {offline.out}" in tracked[0]
    assert read_json(offline.out / names.RUN)["status"] == "FINISHED"


def test_store_that_cannot_be_written_is_named_and_not_waited_for(
    offline: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a project's folder that is read-only: MLflow would try for minutes, and name no cause in time."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/gone/mlflow.db")
    out = Path(shutil.copytree(offline.out, tmp_path / "run"))
    line = Follower(out, tmp_path).finish(PATIENCE)
    assert line.startswith(f"tracking incomplete ({tmp_path}/gone/mlflow.db: cannot be written; set tracking.uri or ")


def synced(out: Path) -> str:
    """Where a run is uploaded to; nothing while the server is too busy to answer."""
    return verb("sync", out).stdout


def test_sync_uploads_later_what_is_missing(server: Server, offline: Trained, tmp_path: Path):
    out = Path(shutil.copytree(offline.out, tmp_path / "run"))
    assert until(lambda: synced(out)).startswith(f"{server.uri}/#/experiments/")
    assert_complete(server, out)


def followers(out: Path) -> list[int]:
    """The processes that upload a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if "samebits.tracking.tracking" in words and str(out) in words:
            found.append(int(path.parent.name))
    return found


@contextmanager
def started(out: Path, prepared: Path, *overrides: str, uri: str, script: Path | None = None) -> Iterator[Warm]:
    """A training that is still at it, and whose follower has just been started."""
    files, env = {"out": out.with_suffix(".out"), "err": out.with_suffix(".err")}, {"MLFLOW_TRACKING_URI": uri}
    words = [*(["train"] if script else []), *training(out, prepared, *overrides)]
    process = Warm(*words, **files, env=env, script=script)
    try:
        until(lambda: process.poll() is not None or followers(out))
        assert process.poll() is None, said(out)
        yield process
    finally:
        process.kill()
        process.wait()


def said(out: Path) -> tuple[str, str]:
    """What it printed, and its errors."""
    return out.with_suffix(".out").read_text(), out.with_suffix(".err").read_text()


def test_server_that_dies_midway_costs_a_warning(server: Server, tmp_path: Path, prepared: Path, untracked: Trained):
    out = tmp_path / "run"
    with started(out, prepared, "tracking.wait_seconds=3", uri=server.uri) as process:
        until((out / names.METRIC_ROWS).read_text)
        process.send_signal(signal.SIGSTOP)  # so that it is midway for sure
        until(lambda: tracking.read_state(out).get("rows"))
        server.kill()
        process.send_signal(signal.SIGCONT)
        code, (stdout, stderr) = process.wait(), said(out)
    try:
        assert (code, stderr) == (0, "")
        assert "tracking incomplete (" in stdout and f"samebits sync {out}" in stdout
        assert Trained(out, untracked.done).weights == untracked.weights
        assert followers(out) == []
    finally:
        server.start()
    assert server.content(out)["runs"][0][0] == "RUNNING"
    tracking.sync(out, LOCKS)
    assert_complete(server, out)


NOTING = """
import os, sys

def hook(event, arguments):
    if event == "socket.connect":
        with open(os.environ["NOTES"], "a") as notes:
            print(os.getpid(), arguments[1], file=notes)

sys.addaudithook(hook)
"""
TRAINING = "import runpy\nrunpy.run_module('samebits', run_name='__main__', alter_sys=True)\n"


@pytest.mark.long
def test_server_that_hangs_does_not_hold_the_training_up(
    server: Server, tmp_path: Path, prepared: Path, untracked: Trained, monkeypatch: pytest.MonkeyPatch
):
    """It ends while the server still hangs, and has asked nothing of it itself."""
    out, notes = tmp_path / "run", tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    (tmp_path / "noted.py").write_text(f"{NOTING}{TRAINING}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("NOTES", str(notes))

    def asking() -> set[int]:
        """The processes that connected to the server."""
        lines = notes.read_text().splitlines() if notes.is_file() else []
        return {int(line.split()[0]) for line in lines if str(server.port) in line}

    server.signal(signal.SIGSTOP)
    try:
        with started(out, prepared, "tracking.wait_seconds=1", uri=server.uri, script=tmp_path / "noted.py") as process:
            process.send_signal(signal.SIGSTOP)  # until the upload is held up
            following = set(followers(out))
            until(asking)
            process.send_signal(signal.SIGCONT)
            code, (stdout, stderr) = process.wait(), said(out)
    finally:
        server.signal(signal.SIGCONT)
    assert (code, stderr) == (0, "") and "tracking incomplete (" in stdout
    assert Trained(out, untracked.done).weights == untracked.weights
    assert asking() == following
    until(lambda: synced(out))  # it is refused while the server starts its worker anew, which did not answer
    assert_complete(server, out)


@pytest.mark.long
def test_upload_of_a_killed_training_ends_by_itself(server: Server, tmp_path: Path, prepared: Path):
    out = tmp_path / "run"
    with started(out, prepared, uri=server.uri) as process:
        following = followers(out)
        for pid in following:
            os.kill(pid, signal.SIGSTOP)  # while it imports: it must not take its new parent for the training
        process.kill()
        process.wait()
        for pid in following:
            os.kill(pid, signal.SIGCONT)
        assert following
    until(lambda: not followers(out))
    content = server.content(out)
    assert content["runs"][0][0] == "RUNNING" and Counter(content["metrics"]) == logged(out)
