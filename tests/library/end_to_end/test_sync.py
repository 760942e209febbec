"""Uploading a record: each row exactly once, whatever is killed, lost, asked twice or asked wrongly."""

import json
import os
import shutil
import signal
import uuid
from pathlib import Path
from threading import Thread

import pytest
from clone import verb
from machine import encrypt
from server import Proxy, Server, assert_complete
from support import PROJECT, WORD, Trained, python
from warm import FORKS, PATIENCE

from samebits.address.locks import locks_here
from samebits.base.files import read_json, write_json
from samebits.core.errors import RunError, UserError
from samebits.record import names
from samebits.tracking import tracking

pytestmark = pytest.mark.usefixtures("address")
LOCKS = PROJECT / "requirements"

# ---- exactly once


def rename(folder: Path) -> None:
    """Make a record that of another run, which no server has seen."""
    (folder / names.UPLOAD).unlink(missing_ok=True)
    write_json(folder / names.RUN, read_json(folder / names.RUN) | {"id": uuid.uuid4().hex})


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
            (tracked.out / names.UPLOAD).unlink()
        assert tracking.sync(tracked.out, LOCKS)["complete"]
        assert server.content(tracked.out) == before and server.artifacts(tracked.out) == artifacts


def test_growing_record_is_uploaded_row_by_row(server: Server, another: Path):
    facts = read_json(another / names.RUN)
    lines = (another / names.METRIC_ROWS).read_text().splitlines(keepends=True)
    write_json(another / names.RUN, facts | {"status": "RUNNING", "ended": None})
    for count in (0, 1, 5, len(lines)):
        half_a_row = lines[count][:20] if count < len(lines) else ""
        (another / names.METRIC_ROWS).write_text("".join(lines[:count]) + half_a_row)
        state = tracking.sync(another, LOCKS)
        assert (state["rows"], state["complete"]) == (count, False)
        assert server.content(another)["runs"][0][0] == "RUNNING"
    write_json(another / names.RUN, facts)
    tracking.sync(another, LOCKS)
    assert_complete(server, another)


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own
def test_default_store_is_a_file_in_the_project(
    server: Server, another: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    local = Server(tmp_path)
    local.take_over(server)
    facts = read_json(another / names.RUN)
    elsewhere = facts["tracking"] | {"uri": "", "experiment": "local"}  # its artifacts go to ./mlruns
    write_json(another / names.RUN, facts | {"tracking": elsewhere})
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert tracking.sync(another, LOCKS)["where"].startswith("sqlite:///mlflow.db, run ")
        assert_complete(local, another)
        (another / names.UPLOAD).unlink()
    assert len(list((tmp_path / "mlruns").rglob(names.WEIGHTS))) == 1
    assert server.runs_of(another) == []


def test_files_that_the_loop_has_logged_are_uploaded_under_their_names(server: Server, another: Path):
    (another / names.LOGGED_FILES / "samples").mkdir(parents=True)
    (another / names.LOGGED_FILES / "samples" / "last.txt").write_text("text")
    files = {"files": ["samples/last.txt", "samples/lost.txt", "../run.json"]}
    write_json(another / names.RUN, read_json(another / names.RUN) | files)
    tracking.sync(another, LOCKS)
    assert [name for name in server.artifacts(another) if name.startswith("files")] == ["files/samples/last.txt"]


def test_server_behind_tls_is_uploaded_to(
    server: Server, another: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """MLFLOW_TRACKING_SERVER_CERT_PATH names the certificate; without it the server is not believed."""
    with Proxy(server.port) as proxy:
        certificate = encrypt(proxy, tmp_path)
        Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri.replace("http:", "https:"))
        with pytest.raises(RunError, match="SSLCertVerificationError"):
            tracking.sync(another, LOCKS)
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate))
        tracking.sync(another, LOCKS)
        proxy.shutdown()
    assert_complete(server, another)


def test_many_rows_of_another_record_go_in_several_requests(server: Server, tracked: Trained, another: Path):
    with (another / names.METRIC_ROWS).open("a") as rows:
        for step in range(1000, 1600):
            print(json.dumps({"step": step, "time": 1, "metrics": {"a": step, "b": -step}}), file=rows)
    tracking.sync(another, LOCKS)
    assert_complete(server, another)
    assert server.runs_of(another) != server.runs_of(tracked.out)


def test_infinities_and_nan_are_uploaded_once(server: Server, another: Path):
    odd = {"plus": float("inf"), "minus": float("-inf"), "none": float("nan")}
    (another / names.METRIC_ROWS).write_text(json.dumps({"step": 0, "time": 1, "metrics": odd}) + "\n")
    for _ in range(2):
        tracking.sync(another, LOCKS)
        (another / names.UPLOAD).unlink()
    metrics = server.content(another)["metrics"]
    assert sorted((key, is_nan) for key, *_, is_nan in metrics) == [("minus", 0), ("none", 1), ("plus", 0)]


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locks of this environment alone: each file is a request."""
    folder = tmp_path_factory.mktemp("locks")
    for path in locks_here(LOCKS):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def few(another: Path) -> Path:
    """That record with fewer files of one kind, each of which is some requests."""
    for name in (names.ENVIRONMENT, names.METRICS, names.CURVES, names.RECEIPT, names.rank_rows(0)):
        (another / name).unlink()
    return another


@pytest.mark.long
def test_lost_answers_do_no_harm(server: Server, few: Path, locks: Path, proxy: Proxy):
    """The server did what was asked and its answer was lost: at every request of an upload in turn."""
    for fatal in range(1, 100):
        rename(few)
        proxy.count, proxy.fatal = 0, fatal
        try:
            tracking.sync(few, locks)
        except RunError:
            assert proxy.count == fatal  # it is not asked again at once: that made second runs
            tracking.sync(few, locks)
        assert_complete(server, few)
        if proxy.count < fatal:
            break
    assert fatal > 10


def upload(folder: Path, uri: str, locks: Path) -> None:
    """What a child does: as `samebits sync`."""
    os.environ["MLFLOW_TRACKING_URI"] = uri
    tracking.sync(folder, locks)


@pytest.mark.long
def test_killed_uploads_end_up_exactly_once(server: Server, few: Path, locks: Path, proxy: Proxy):
    """The uploader is killed (SIGKILL) at every request of an upload in turn, each going on from the last."""
    for fatal in range(1, 100):
        child = FORKS.Process(target=upload, args=(few, proxy.uri, locks))
        proxy.count, proxy.fatal, proxy.act = 0, fatal, lambda child=child: os.kill(child.pid, signal.SIGKILL)
        child.start()
        child.join(PATIENCE)
        assert len(server.runs_of(few)) <= 1
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        assert {path.name for path in few.iterdir()} <= names.FILES | {names.TRACE, names.CHECKPOINTS}
    assert fatal > 5
    assert_complete(server, few)


def test_second_upload_of_the_same_run_is_refused_and_harmless(server: Server, another: Path, proxy: Proxy):
    refused = []

    def meanwhile() -> None:
        try:
            tracking.sync(another, LOCKS)
        except UserError as refusal:
            refused.append(str(refusal))

    child = FORKS.Process(target=upload, args=(another, proxy.uri, LOCKS))
    proxy.fatal, proxy.act = 5, meanwhile
    child.start()
    child.join(PATIENCE)
    assert refused == [f"{another}: another process is uploading this run; wait for it to end"]
    tracking.sync(another, LOCKS)
    assert_complete(server, another)


def test_failed_training_is_told_as_failed(server: Server, another: Path):
    facts = read_json(another / names.RUN)
    write_json(another / names.RUN, facts | {"status": "FAILED"})
    (another / names.WEIGHTS).unlink()
    (another / names.METRICS).unlink()
    tracking.sync(another, LOCKS)
    assert server.content(another)["runs"][0][0] == "FAILED"
    assert "model.safetensors" not in server.artifacts(another)


# ---- what a user can get wrong


def test_folder_without_a_record_is_refused(tmp_path: Path):
    done = verb("sync", tmp_path)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"{tmp_path}: no run.json seen, a run directory wanted" in done.stderr


def test_sync_without_a_server_fails_in_a_line(another: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{WORD}@127.0.0.1:1")
    done = python("-m", "samebits", "sync", another)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done.stderr
    assert done.stderr.startswith("tracking: ") and WORD not in done.stderr
