"""An MLflow server, and what its store must hold of a run."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from warm import PATIENCE

from samebits.address.manifest import sha256_file
from samebits.base.files import read_json
from samebits.record import names
from samebits.tracking import tracking

READY = 2  # how MLflow's store says that a LoggedModel is whole
SERVING = tracking.QUIET | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # seven processes less


def until(condition: Callable[[], Any]) -> Any:
    """Wait for something to become true, and return it."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"not true after {PATIENCE} s: {condition}"
        time.sleep(0.05)
    return value


def until_gone(pid: int) -> None:
    """Wait for the end of a process that is not this one's child; who adopts it may not ask how it ended."""
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: not stat.exists() or ") Z " in stat.read_text())


class Quiet(BaseHTTPRequestHandler):
    """A stand-in for a server, of which no request is printed."""

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server and counts them; number `fatal` is carried out but not answered.

    One that asks for what is `unknown` is not passed on, as where an older server lacks it.
    """

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.upstream, self.count, self.fatal, self.act = upstream, 0, 0, lambda: None
        self.unknown = "\0"  # no path has it
        self.uri = f"http://127.0.0.1:{self.server_port}"


class Passing(Quiet):
    """One connection to the proxy."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.unknown in self.path:
            self.send_error(404)
            return
        kept = {name: value for name, value in self.headers.items() if name not in ("Host", "Connection")}
        with closing(HTTPConnection("127.0.0.1", self.server.upstream, timeout=PATIENCE)) as upstream:
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
            return urllib.request.urlopen(f"{self.uri}/health", timeout=PATIENCE).status == 200
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "mlflow.db", timeout=PATIENCE)) as store:
            return store.execute(query, values).fetchall()

    def take_over(self, other: "Server") -> None:
        """Copy the store of another server: making a new one takes seconds."""
        stores = [closing(sqlite3.connect(each.folder / "mlflow.db")) for each in (other, self)]
        with stores[0] as theirs, stores[1] as ours:
            theirs.backup(ours)

    def runs_of(self, folder: Path) -> list[str]:
        """The MLflow runs that were made for the run recorded in a folder."""
        identity = read_json(folder / names.RUN)["id"]
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
        tables["models"] = (
            "SELECT status, tag_value FROM logged_models JOIN logged_model_tags USING (model_id)"
            " WHERE source_run_id = ? AND tag_key = 'repro.weights'"
        )
        tables["model metrics"] = (
            "SELECT metric_name, metric_value, metric_timestamp_ms, metric_step FROM logged_model_metrics"
            " WHERE run_id = ?"
        )
        return {name: sorted(self.rows(query, run)) for name, query in tables.items()}

    def artifacts(self, folder: Path) -> dict[str, Path]:
        (run,) = self.runs_of(folder)
        (root,) = (self.folder / "artifacts").glob(f"*/{run}/artifacts")
        return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def logged(folder: Path) -> Counter[tuple[str, float, int, int, int]]:
    """The metrics of the local record, as rows of the store."""
    rows = [json.loads(line) for line in (folder / names.METRIC_ROWS).read_text().splitlines()]
    metrics = [(key, value, row["time"], row["step"], 0) for row in rows for key, value in row["metrics"].items()]
    return Counter(metrics)


def assert_complete(server: Server, folder: Path) -> None:
    """The store has one run for this record, with every row of it exactly once."""
    content = server.content(folder)
    facts = read_json(folder / names.RUN)
    assert Counter(content["metrics"]) == logged(folder)
    assert content["params"] == sorted((key, str(value)) for key, value in facts["config"].items())
    assert content["runs"] == [("FINISHED", facts["started"], facts["ended"])]
    assert len(content["datasets"]) == 1
    assert content["models"] == [(READY, sha256_file(folder / names.WEIGHTS))]
    last = json.loads((folder / names.METRIC_ROWS).read_text().splitlines()[-1])["metrics"]
    assert sorted(name for name, *_ in content["model metrics"]) == sorted(last)
    assert tracking.read_state(folder)["complete"]
