"""Tracking for a team: an MLflow server on PostgreSQL, either of which may die midway and come back; what it shows."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path

import pytest
from bake import VENV
from baked import InstalledProject, weights
from browser import Browser
from machine import PATIENCE, awaits_sigterm, free_port, halt, until, writer
from postgres import Database


class Tracking:
    """A real MLflow server on it."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder, self.port = folder, free_port()
        self.store = f"postgresql+psycopg2://mlflow@127.0.0.1:{database.port}/mlflow"
        self.uri = f"http://127.0.0.1:{self.port}"
        folder.mkdir()
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        stores = ["--backend-store-uri", self.store, "--artifacts-destination", str(self.folder / "artifacts")]
        command = [str(VENV / "bin" / "python"), "-m", "mlflow", "server", *where, *stores]
        log = (self.folder / "log").open("a")
        env = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        until(self.answers, "MLflow answers")

    def answers(self) -> bool:
        """Say whether somebody listens."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    """A PostgreSQL that ends with the tests."""
    database = Database()
    yield database
    database.end()


@pytest.fixture(scope="module")
def tracking(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracking]:
    """An MLflow server that ends with the tests."""
    tracking = Tracking(tmp_path_factory.mktemp("tracking") / "mlflow", database)
    yield tracking
    tracking.kill()


def test_server_and_database_that_die_midway_lose_and_double_nothing(
    project: InstalledProject, database: Database, tracking: Tracking, tmp_path: Path
) -> None:
    """Two ranks log over HTTP; the server is killed, then the database, each while they train."""
    out = tmp_path / "run"

    def command(out: Path, *settings: str, before: tuple[str, ...] = ()) -> list[str]:
        sets = [word for setting in ("train.epochs=6", *settings) for word in ("--set", setting)]
        return [str(project.python), *before, "-m", "samebits", "train", *sets, "--out", str(out)]

    env = {**project.env, "MLFLOW_TRACKING_URI": tracking.uri}
    log = (tmp_path / "training.log").open("w")
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    patient = "parallel.timeout_seconds=3600", f"tracking.wait_seconds={PATIENCE}"
    words = command(out, *patient, before=torchrun)
    training = subprocess.Popen(words, cwd=project.path, env=env, stdout=log, stderr=log, start_new_session=True)

    def uploaded() -> int:
        counted = (
            database.query("SELECT count(*) FROM metrics")
            if database.query("SELECT to_regclass('metrics')")[0][0]
            else [["0"]]
        )
        return int(counted[0][0])

    def in_vain() -> bool:
        """Say whether the last attempt to upload failed."""
        return bool(json.loads((out / "tracking.json").read_text())["error"])

    def pause() -> list[int]:
        """Hold the ranks, but not the process that uploads: so that it is midway for sure."""
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_rank(path, str(out))]
        for pid in found:
            halt(pid)
        return found

    def go_on(ranks: list[int]) -> None:
        """Undo `pause`."""
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)

    rows = out / "metrics.jsonl"
    until(lambda: rows.is_file() and rows.read_bytes().count(b"\n") >= 3, "the training logs")
    ranks = pause()
    assert len(ranks) == 2 and training.poll() is None
    until(uploaded, "the first rows arrive")
    tracking.kill()
    go_on(ranks)
    until(in_vain, "the upload meets nobody")
    ranks, before = pause(), uploaded()
    assert len(ranks) == 2 and training.poll() is None
    tracking.start()
    until(lambda: not in_vain(), "the upload goes on")
    database.kill()
    go_on(ranks)
    until(in_vain, "the upload meets no database")
    database.start()
    assert training.wait(PATIENCE) == 0, (tmp_path / "training.log").read_text()
    assert before < uploaded()

    wanted = [(row["step"], name) for row in map(json.loads, rows.read_text().splitlines()) for name in row["metrics"]]
    found = [(int(step), name) for step, name in database.query("SELECT step, key FROM metrics")]
    assert sorted(found) == sorted(wanted)
    assert [row[0] for row in database.query("SELECT status FROM runs")] == ["FINISHED"]
    models = (
        "SELECT tag_value FROM logged_models JOIN logged_model_tags USING (model_id) WHERE tag_key = 'repro.weights'"
    )
    assert database.query(models) == [[weights(out)]]

    # the other run has no server: the library writes to a database
    database.query("CREATE DATABASE direct", "postgres")
    direct = f"postgresql+psycopg2://127.0.0.1:{database.port}/direct"
    own = {name: value for name, value in env.items() if name != "MLFLOW_TRACKING_URI"} | {"PGUSER": "mlflow"}
    words = command(tmp_path / "alone", f"tracking.uri={direct}")
    subprocess.run(words, cwd=project.path, env=own, check=True, capture_output=True)
    assert weights(out) == weights(tmp_path / "alone")
    assert database.query("SELECT status FROM runs", "direct") == [["FINISHED"]]
    assert database.query(models, "direct") == [[weights(out)]]


EXPERIMENT = "pages"


@pytest.fixture(scope="module")
def swept(project: InstalledProject, tracking: Tracking, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The two runs of a sweep that was interrupted, and went on by the same command."""
    out, log = tmp_path_factory.mktemp("swept"), tmp_path_factory.mktemp("log") / "log"
    settings = "train.epochs=3", "checkpoint.every=2", f"tracking.experiment={EXPERIMENT}"
    sets = [word for setting in settings for word in ("--set", setting)]
    words = [project.python, "-m", "samebits", "sweep", "seed=0..1", *sets, "--jobs", "2", "--out", out]
    env = {**project.env, "MLFLOW_TRACKING_URI": tracking.uri}

    def sweep() -> "subprocess.Popen[bytes]":
        with log.open("a") as said:
            return subprocess.Popen(words, cwd=project.path, env=env, stdout=said, stderr=said)

    held = dict[Path, int]()

    def hold() -> bool:
        """Stop each run once it has logged, so that it is midway for sure; whether both are."""
        for rows in {*out.glob("*/metrics.jsonl")} - {*held}:
            if rows.read_bytes().count(b"\n") > 4:
                held[rows] = writer(rows)
                halt(held[rows])
        return len(held) == 2

    first = sweep()
    until(hold, "both runs log")
    first.send_signal(signal.SIGINT)
    until(lambda: all(map(awaits_sigterm, held.values())), "both are sent SIGTERM")
    for pid in held.values():
        os.kill(pid, signal.SIGCONT)
    assert first.wait(PATIENCE) == 130, log.read_text()
    runs = sorted(path.parent for path in out.glob("*/run.json"))
    assert [json.loads((run / "run.json").read_text())["status"] for run in runs] == ["KILLED"] * 2
    assert sweep().wait(PATIENCE) == 0, log.read_text()
    return runs


def shown(browser: Browser) -> list[str]:
    """The lines of the page."""
    return str(browser.value("document.body.innerText")).splitlines()


def test_page_of_mlflow_shows_whose_run_it_is_of_which_commit_and_whose_child(
    project: InstalledProject, database: Database, tracking: Tracking, swept: list[Path], tmp_path: Path
) -> None:
    """In a browser. Each run of the sweep was killed and resumed, and is one run all the same, as the sweep is."""
    found = "SELECT experiment_id FROM experiments WHERE name = '" + EXPERIMENT + "'"
    experiment = f"{tracking.uri}/#/experiments/{database.query(found)[0][0]}/runs"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=project.path, capture_output=True, text=True, check=True)
    names = []
    with Browser(tmp_path) as browser:
        for run in swept:
            facts = json.loads((run / "run.json").read_text())
            names.append(f"train {facts['tags']['repro.address'][:8]} seed {facts['config']['seed']}")
            query = f"SELECT run_uuid FROM tags WHERE key = 'repro.run' AND value = '{facts['id']}'"
            ((identity,),) = database.query(query)
            browser.open(f"{experiment}/{identity}", 1900)
            until(lambda: {"About this run", "Parent run"} <= {*shown(browser)}, "the page of the run is there")
            lines = shown(browser)
            about = lines[lines.index("About this run") :]
            assert names[-1] in lines
            assert about[about.index("Created by") + 1] == getuser()
            assert about[about.index("Status") + 1] == "Finished"
            parent = about[about.index("Parent run") + 1]
            source = about.index("Source")
            assert about[source + 1 : source + 3] == ["samebits train", commit.stdout[:7]]
        assert parent.startswith("sweep ") and parent.endswith(" seed")
        browser.open(experiment, 1900)
        until(lambda: "3 matching runs" in shown(browser), "the table is there")
        until(lambda: parent in shown(browser), "it has the sweep")
        assert "samebits sweep" in shown(browser) and not {*names} & {*shown(browser)}
        browser.value("document.querySelector('[role=row] button[data-component-id*=runnamecellrenderer]').click()")
        until(lambda: {*names} <= {*shown(browser)}, "its children are there")
        assert shown(browser).count("samebits train") == 2


def is_rank(process: Path, out: str) -> bool:
    """Say whether a process of /proc is a rank of the training into `out`."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False  # it has ended
    return {out, "samebits", "train"} <= {*words} and "torch.distributed.run" not in words
