"""Tracking against a real MLflow server: complete, exactly once, and never in the way of the training."""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import PACKAGE, PROJECT, Trained, python, training
from project.config import Config
from project.repro import record, tracking
from project.repro.errors import Failure, Refused
from project.repro.files import read_json, write_json
from project.repro.manifest import sha256_file

WORD = "pa55word"
SECONDS = 180  # the most that anything here may take on a busy machine
SERVING = tracking.QUIET | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes less


def until(condition: Callable[[], Any]) -> Any:
    """Wait for something to become true, and return it."""
    end = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < end, f"not true after {SECONDS} s: {condition}"
        time.sleep(0.05)
    return value


class Server:
    """An MLflow server on an SQLite database, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            *("mlflow", "server", "--backend-store-uri", tracking.DEFAULT_URI, "--workers", "1"),
            *("--artifacts-destination", "artifacts", "--host", "127.0.0.1", "--port", str(self.port)),
        ]
        with (self.folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=os.environ | SERVING,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._healthy)

    def _healthy(self) -> bool:
        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=1).status == 200
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "mlflow.db", timeout=SECONDS)) as store:
            return store.execute(query, values).fetchall()

    def take_over(self, other: "Server") -> None:
        """Copy the store of another server: making a new one takes seconds."""
        stores = [closing(sqlite3.connect(each.folder / "mlflow.db")) for each in (other, self)]
        with stores[0] as theirs, stores[1] as ours:
            theirs.backup(ours)

    def runs_of(self, folder: Path) -> list[str]:
        """The MLflow runs that were made for the run recorded in a folder."""
        identity = read_json(folder / record.RUN)["id"]
        query = "SELECT run_uuid FROM tags WHERE key = 'repro.run' AND value = ?"
        return [run for (run,) in self.rows(query, identity)]

    def content(self, folder: Path) -> dict[str, list[tuple[Any, ...]]]:
        """Every row that the store has about the run recorded in a folder."""
        (run,) = self.runs_of(folder)
        tables = {
            "runs": "SELECT status, start_time, end_time FROM runs WHERE run_uuid = ?",
            "metrics": "SELECT key, value, timestamp, step, is_nan FROM metrics WHERE run_uuid = ?",
            "latest": "SELECT key, value, timestamp, step FROM latest_metrics WHERE run_uuid = ?",
            "params": "SELECT key, value FROM params WHERE run_uuid = ?",
            "tags": "SELECT key, value FROM tags WHERE run_uuid = ?",
            "datasets": "SELECT name, digest, dataset_profile FROM datasets JOIN inputs"
            " ON source_id = dataset_uuid WHERE destination_id = ?",
        }
        return {name: sorted(self.rows(query, run)) for name, query in tables.items()}

    def artifacts(self, folder: Path) -> dict[str, Path]:
        (run,) = self.runs_of(folder)
        (root,) = (self.folder / "artifacts").glob(f"*/{run}/artifacts")
        return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of this file."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process uploads goes to the server."""
    if "server" in request.fixturenames:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server").uri)


@pytest.fixture(scope="module")
def tracked(server: Server, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training that the server followed; its URI, with a password, stands in the environment."""
    folder = tmp_path_factory.mktemp("tracked")
    uri = f"http://user:{WORD}@127.0.0.1:{server.port}"
    elsewhere = f"tracking.uri=sqlite:///{folder}/elsewhere.db"
    done = python(*training(folder / "run", prepared, elsewhere), env={"MLFLOW_TRACKING_URI": uri})
    assert done.returncode == 0, done.stderr
    return Trained(folder / "run", done)


def logged(folder: Path) -> Counter[tuple[str, float, int, int, int]]:
    """The metrics of the local record, as rows of the store."""
    rows = [json.loads(line) for line in (folder / record.STEPS).read_text().splitlines()]
    metrics = [(key, value, row["time"], row["step"], 0) for row in rows for key, value in row["metrics"].items()]
    return Counter(metrics)


def assert_complete(server: Server, folder: Path) -> None:
    """The store has one run for this record, with every row of it exactly once."""
    content = server.content(folder)
    facts = read_json(folder / record.RUN)
    assert Counter(content["metrics"]) == logged(folder)
    assert content["params"] == sorted((key, str(value)) for key, value in facts["config"].items())
    assert content["runs"] == [("FINISHED", facts["started"], facts["ended"])]
    assert len(content["datasets"]) == 1
    assert tracking.read_state(folder)["complete"]


# ---- what a tracked run leaves behind


def test_one_training_is_one_complete_run(server: Server, tracked: Trained):
    assert_complete(server, tracked.out)


def test_each_step_is_there_once(server: Server, tracked: Trained):
    steps = read_json(tracked.out / record.METRICS)["steps"]
    losses = [step for key, _, _, step, _ in server.content(tracked.out)["metrics"] if key == "loss"]
    assert losses and sorted(losses) == list(range(int(steps)))


def test_parameters_are_the_flattened_config(server: Server, tracked: Trained, config: Config):
    parameters = dict(server.content(tracked.out)["params"])
    assert set(parameters) == set(config.flat())
    assert parameters["train.epochs"] == "1" and parameters["model.name"] == config.model.name


def test_tags_name_what_was_asked_for_and_what_came_out(server: Server, tracked: Trained):
    tags = dict(server.content(tracked.out)["tags"])
    address = read_json(tracked.out / record.ADDRESS)
    environment = read_json(tracked.out / record.ENVIRONMENT)
    wanted = {
        "repro.address": address["address"],
        "repro.data": address["parts"]["data"],
        "repro.lock": address["parts"]["lock"],
        "repro.environment": environment["environment"],
        "repro.weights": tracked.weights,
    }
    assert {name: tags[name] for name in wanted} == wanted
    assert {"repro.commit", "repro.dirty", "repro.image", "repro.run"} <= set(tags)


def test_artifacts_are_the_fingerprint_the_locks_and_the_weights(server: Server, tracked: Trained):
    found = {name: sha256_file(path) for name, path in server.artifacts(tracked.out).items()}
    names = record.ADDRESS, record.ENVIRONMENT, record.METRICS, record.WEIGHTS
    wanted = {name: sha256_file(tracked.out / name) for name in names}
    locks = (PROJECT / "requirements").glob("*.txt")
    assert found == wanted | {f"requirements/{path.name}": sha256_file(path) for path in locks}
    assert len(found) >= 7


def test_dataset_is_an_input_with_its_digest(server: Server, tracked: Trained, config: Config):
    ((name, digest, profile),) = server.content(tracked.out)["datasets"]
    whole = read_json(tracked.out / record.ADDRESS)["parts"]["data"]
    assert name == Path(config.data.raw).name and digest == whole[:36]
    assert json.loads(profile)["digest"] == whole


def test_environment_wins_over_params_yaml(server: Server, tracked: Trained):
    assert not (tracked.out.parent / "elsewhere.db").exists()
    assert f"tracked    {server.uri}/#/experiments/" in tracked.done.stdout


def test_address_in_force(monkeypatch: pytest.MonkeyPatch):
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
    address = [read_json(each.out / record.ADDRESS) for each in (tracked, untracked, offline)]
    assert address[0] == address[1] == address[2]


# ---- exactly once


def rename(folder: Path) -> None:
    """Make a record that of another run, which no server has seen."""
    (folder / tracking.STATE).unlink(missing_ok=True)
    write_json(folder / record.RUN, read_json(folder / record.RUN) | {"id": uuid.uuid4().hex})


@pytest.fixture
def another(tracked: Trained, tmp_path: Path) -> Path:
    """The record of another run with the same numbers."""
    shutil.copytree(tracked.out, tmp_path / "run")
    rename(tmp_path / "run")
    return tmp_path / "run"


def test_syncing_again_changes_nothing(server: Server, tracked: Trained):
    before, artifacts = server.content(tracked.out), server.artifacts(tracked.out)
    for forget in (False, True):
        if forget:  # as on another machine, or after the state was lost
            (tracked.out / tracking.STATE).unlink()
        assert tracking.sync(tracked.out)["complete"]
        assert server.content(tracked.out) == before and server.artifacts(tracked.out) == artifacts


def test_two_records_are_two_runs(server: Server, tracked: Trained, another: Path):
    tracking.sync(another)
    assert_complete(server, another)
    assert server.runs_of(another) != server.runs_of(tracked.out)


def test_growing_record_is_uploaded_row_by_row(server: Server, another: Path):
    facts = read_json(another / record.RUN)
    lines = (another / record.STEPS).read_text().splitlines(keepends=True)
    write_json(another / record.RUN, facts | {"status": "RUNNING", "ended": None})
    for count in (0, 1, 5, len(lines)):
        half_a_row = lines[count][:20] if count < len(lines) else ""
        (another / record.STEPS).write_text("".join(lines[:count]) + half_a_row)
        state = tracking.sync(another)
        assert (state["rows"], state["complete"]) == (count, False)
        assert server.content(another)["runs"][0][0] == "RUNNING"
    write_json(another / record.RUN, facts)
    tracking.sync(another)
    assert_complete(server, another)


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own
def test_default_store_is_a_file_in_the_project(
    server: Server, another: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    local = Server(tmp_path)
    local.take_over(server)
    facts = read_json(another / record.RUN)
    elsewhere = facts["tracking"] | {"uri": "", "experiment": "local"}  # its artifacts go to ./mlruns
    write_json(another / record.RUN, facts | {"tracking": elsewhere})
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert tracking.sync(another)["where"].startswith("sqlite:///mlflow.db, run ")
        assert_complete(local, another)
        (another / tracking.STATE).unlink()
    assert len(list((tmp_path / "mlruns").rglob(record.WEIGHTS))) == 1
    assert server.runs_of(another) == []


def test_many_rows_go_in_several_requests(server: Server, another: Path):
    with (another / record.STEPS).open("a") as rows:
        for step in range(1000, 1600):
            print(json.dumps({"step": step, "time": 1, "metrics": {"a": step, "b": -step}}), file=rows)
    tracking.sync(another)
    assert_complete(server, another)


def test_infinities_and_nan_are_uploaded_once(server: Server, another: Path):
    odd = {"plus": float("inf"), "minus": float("-inf"), "none": float("nan")}
    (another / record.STEPS).write_text(json.dumps({"step": 0, "time": 1, "metrics": odd}) + "\n")
    for _ in range(2):
        tracking.sync(another)
        (another / tracking.STATE).unlink()
    metrics = server.content(another)["metrics"]
    assert sorted((key, is_nan) for key, *_, is_nan in metrics) == [("minus", 0), ("none", 1), ("plus", 0)]


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server and counts them; number `fatal` is carried out but not answered."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.upstream, self.count, self.fatal, self.act = upstream, 0, 0, lambda: None
        self.uri = f"http://127.0.0.1:{self.server_port}"


class Passing(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kept = {name: value for name, value in self.headers.items() if name not in ("Host", "Connection")}
        with closing(HTTPConnection("127.0.0.1", self.server.upstream, timeout=SECONDS)) as upstream:
            upstream.request(self.command, self.path, body, kept)
            answer = upstream.getresponse()
            data = answer.read()
        self.server.count += 1
        if self.server.count == self.server.fatal:
            self.server.act()
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server, which this process and its children upload through."""
    with Proxy(server.port) as proxy:
        Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
        yield proxy
        proxy.shutdown()


def test_lost_answers_do_no_harm(server: Server, another: Path, proxy: Proxy):
    """The server did what was asked and its answer was lost: at every request of an upload in turn."""
    for fatal in range(1, 100):
        rename(another)
        proxy.count, proxy.fatal = 0, fatal
        try:
            tracking.sync(another)
        except Failure:
            assert proxy.count == fatal  # it is not asked again at once: that made second runs
            tracking.sync(another)
        assert_complete(server, another)
        if proxy.count < fatal:
            break
    assert fatal > 10


forks = multiprocessing.get_context("forkserver")  # no threads and no connections of this process
forks.set_forkserver_preload(["mlflow", f"{PACKAGE}.repro.tracking"])


def upload(folder: str, uri: str) -> None:
    """What a child does: as `repro sync`."""
    os.environ["MLFLOW_TRACKING_URI"] = uri
    tracking.sync(Path(folder))


def test_killed_uploads_end_up_exactly_once(server: Server, another: Path, proxy: Proxy):
    """The uploader is killed (SIGKILL) at every request of an upload in turn, each going on from the last."""
    for fatal in range(1, 100):
        child = forks.Process(target=upload, args=(str(another), proxy.uri))
        proxy.count, proxy.fatal, proxy.act = 0, fatal, lambda child=child: os.kill(child.pid, signal.SIGKILL)
        child.start()
        child.join(SECONDS)
        assert len(server.runs_of(another)) <= 1
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert fatal > 5
    assert_complete(server, another)


def test_second_upload_of_the_same_run_is_refused_and_harmless(server: Server, another: Path, proxy: Proxy):
    refused = []

    def meanwhile() -> None:
        try:
            tracking.sync(another)
        except Refused as refusal:
            refused.append(str(refusal))

    child = forks.Process(target=upload, args=(str(another), proxy.uri))
    proxy.fatal, proxy.act = 5, meanwhile
    child.start()
    child.join(SECONDS)
    assert refused == [f"{another}: another process is uploading this run; wait for it to end"]
    tracking.sync(another)
    assert_complete(server, another)


# ---- never in the way


def test_server_that_is_down_costs_a_warning(offline: Trained):
    assert (offline.done.returncode, offline.done.stderr) == (0, "")
    tracked = [line for line in offline.done.stdout.splitlines() if line.startswith("tracked")]
    assert len(tracked) == 1 and "tracking incomplete (" in tracked[0]
    assert f"the record is kept, upload it with: repro sync {offline.out}" in tracked[0]
    assert read_json(offline.out / record.RUN)["status"] == "FINISHED"


def test_sync_uploads_later_what_is_missing(server: Server, offline: Trained):
    done = python("-m", PACKAGE, "sync", offline.out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{server.uri}/#/experiments/")
    assert_complete(server, offline.out)


def followers(out: Path) -> list[int]:
    """The processes that upload a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if f"{PACKAGE}.repro.tracking" in words and str(out) in words:
            found.append(int(path.parent.name))
    return found


@contextmanager
def started(out: Path, prepared: Path, *overrides: str, uri: str) -> Iterator[subprocess.Popen[str]]:
    """A training that is still at it, and whose follower has just been started."""
    command = [sys.executable, *training(out, prepared, *overrides)]
    env = os.environ | {"MLFLOW_TRACKING_URI": uri}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=PROJECT, env=env, **pipes)
    try:
        until(lambda: process.poll() is not None or followers(out))
        yield process
    finally:
        process.kill()
        process.wait()


def test_server_that_dies_midway_costs_a_warning(server: Server, tmp_path: Path, prepared: Path, untracked: Trained):
    out = tmp_path / "run"
    with started(out, prepared, "tracking.wait_seconds=3", uri=server.uri) as process:
        until((out / record.STEPS).read_text)
        process.send_signal(signal.SIGSTOP)  # so that it is midway for sure
        until(lambda: tracking.read_state(out).get("rows"))
        server.kill()
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=SECONDS)
    try:
        assert (process.returncode, stderr) == (0, "")
        assert "tracking incomplete (" in stdout and f"repro sync {out}" in stdout
        assert Trained(out, untracked.done).weights == untracked.weights
        assert followers(out) == []
    finally:
        server.start()
    assert server.content(out)["runs"][0][0] == "RUNNING"
    tracking.sync(out)
    assert_complete(server, out)


def test_server_that_hangs_does_not_hold_the_training_up(
    server: Server, tmp_path: Path, prepared: Path, untracked: Trained
):
    out = tmp_path / "run"
    server.signal(signal.SIGSTOP)
    try:
        with started(out, prepared, "tracking.wait_seconds=1", uri=server.uri) as process:
            stdout, stderr = process.communicate(timeout=SECONDS)
            ended = time.time()
    finally:
        server.signal(signal.SIGCONT)
    assert (process.returncode, stderr) == (0, "") and "tracking incomplete (" in stdout
    assert Trained(out, untracked.done).weights == untracked.weights

    def seconds(folder: Path) -> float:
        facts = read_json(folder / record.RUN)
        return (facts["ended"] - facts["started"]) / 1000

    # A training that waited would wait 10 s for each of its requests, and a minute at the end.
    assert seconds(out) < seconds(untracked.out) + 20
    assert ended - read_json(out / record.RUN)["ended"] / 1000 < 1 + 10
    tracking.sync(out)
    assert_complete(server, out)


def test_upload_of_a_killed_training_ends_by_itself(server: Server, tmp_path: Path, prepared: Path):
    out = tmp_path / "run"
    with started(out, prepared, uri=server.uri) as process:
        process.kill()
        process.wait()
        assert followers(out)  # still importing: it must not take its new parent for the training
    until(lambda: not followers(out))
    content = server.content(out)
    assert content["runs"][0][0] == "RUNNING" and Counter(content["metrics"]) == logged(out)


def test_failed_training_is_told_as_failed(server: Server, another: Path):
    facts = read_json(another / record.RUN)
    write_json(another / record.RUN, facts | {"status": "FAILED"})
    (another / record.WEIGHTS).unlink()
    (another / record.METRICS).unlink()
    tracking.sync(another)
    assert server.content(another)["runs"][0][0] == "FAILED"
    assert "model.safetensors" not in server.artifacts(another)


# ---- what a user can get wrong


def test_folder_without_a_record_is_refused(tmp_path: Path):
    done = python("-m", PACKAGE, "sync", tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"{tmp_path}: no run.json seen, a run directory wanted" in done.stderr


def test_sync_without_a_server_fails_in_a_line(another: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{WORD}@127.0.0.1:1")
    done = python("-m", PACKAGE, "sync", another)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done.stderr
    assert done.stderr.startswith("tracking: ") and WORD not in done.stderr


def test_lock_is_given_back(another: Path, server: Server):
    tracking.sync(another)
    with (another / tracking.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(Refused, match="another process is uploading this run"):
            tracking.sync(another)
    tracking.sync(another)
