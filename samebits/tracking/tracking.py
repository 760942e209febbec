"""Uploads a run's local record to MLflow, from a process of its own: training never waits for a server.

`sync` uploads what is missing, exactly once, however often it is called and wherever it was cut off:
the MLflow run is found by the record's id; parameters, tags and files overwrite themselves; a metric
row carries the time of its record, and MLflow keeps equal rows once.
"""

import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path
from typing import Any

from ..address.locks import LOCKS
from ..base.files import write_json
from ..base.loading import unsearched
from ..base.redact import without_credentials
from ..core.errors import RunError, UserError
from ..record import names
from ..record.reading import metric_rows, read_record
from ..record.record import files
from .follower import read_state as read_state
from .logged_model import log_model

EMBEDDED = "sqlite:///"
DEFAULT_URI = f"{EMBEDDED}mlflow.db"
BATCH = 1000  # metrics per request: MLflow's limit
PARAMETERS = 100  # parameters per request: likewise
POLL_SECONDS = 1.0
OLD = "(without the model: a server of MLflow 3 is wanted)"
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it holds the URI's password
    # A request repeated at once makes a second run where the first one's answer was lost. Fail, and let
    # the next round look first.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class NoStore(UserError):
    """The embedded store can be written nowhere: no later attempt would do better."""


def require_store(uri: str) -> None:
    """Refuse a file of SQLite that cannot be written, which MLflow would try to open for minutes.

    Raises:
        NoStore: it is such a one.
    """
    if uri.startswith(EMBEDDED):
        path = Path(uri.removeprefix(EMBEDDED).partition("?")[0]).absolute()
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise NoStore(
                f"{path}: cannot be written; set tracking.uri or MLFLOW_TRACKING_URI to another store, or "
                f"tracking.enabled=false"
            )


def address_of(configured: str) -> str:
    """The tracking URI in force: the environment's, else the configured one, else the embedded store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or configured or DEFAULT_URI


def sync(folder: Path, locks: Path) -> dict[str, Any]:
    """Upload what MLflow does not have yet of the run recorded in `folder`, and return the new state.

    The locks (*.txt) in the folder `locks` are uploaded with it.

    Raises:
        UserError: no record there, or its upload is under way in another process.
        RunError: the server could not be reached or refused; what arrived is remembered.
    """
    if not (folder / names.RUN).is_file():
        raise UserError(f"{folder}: no {names.RUN} seen, a run directory wanted, such as artifacts/")
    with _alone(folder):
        try:
            return _upload(folder, locks)
        except UserError as refused:
            write_json(folder / names.UPLOAD, read_state(folder) | {"complete": False, "error": str(refused)})
            raise
        except Exception as error:  # MLflow raises its own, requests', SQLAlchemy's …: all mean "not now"
            reason = without_credentials(" ".join(str(error).split()))[:300] or type(error).__name__
            write_json(folder / names.UPLOAD, read_state(folder) | {"complete": False, "error": reason})
            raise RunError(f"tracking: {reason}") from error


def follow(folder: Path, locks: Path, training: int) -> None:
    """Upload again and again until the run has ended and all of it is there, or its process is gone."""
    os.nice(10)  # the training comes first
    ended, wait, monitor = False, POLL_SECONDS, None
    while True:
        orphaned = os.getppid() != training  # asked before the upload, which therefore sees the last rows
        try:
            state = sync(folder, locks)
            if state["complete"]:
                return
            wait, monitor = POLL_SECONDS, monitor or _system_monitor(folder, state["run"])
        except NoStore as refused:
            print(refused, flush=True)
            return
        except RunError as failure:
            print(failure, flush=True)
            wait = POLL_SECONDS if ended else min(2 * wait, 30.0)
        if orphaned:
            return
        if ended:
            time.sleep(wait)
        else:
            ended = bool(select.select([sys.stdin], [], [], wait)[0])  # the training closes it when it ends
            if ended and monitor:
                monitor.finish()  # before the run is terminated


def _upload(folder: Path, locks: Path) -> dict[str, Any]:
    facts = read_record(folder, names.RUN)
    uri = address_of(facts["tracking"]["uri"])
    require_store(uri)
    os.environ |= QUIET
    with unsearched():
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

    client = MlflowClient(uri)
    state = read_state(folder)
    if state.get("id") != facts["id"] or state.get("uri") != without_credentials(uri):
        state = {"id": facts["id"], "uri": without_credentials(uri), "rows": 0}
    state |= {"complete": False, "error": None}

    def remember(**news: Any) -> None:
        state.update(news)
        write_json(folder / names.UPLOAD, state)

    if "run" not in state:
        experiment, run = _find_or_create(client, facts)
        parameters = [Param(key, str(value)) for key, value in facts["config"].items()]
        for first in range(0, len(parameters), PARAMETERS):
            client.log_batch(run, params=parameters[first : first + PARAMETERS])
        remember(experiment=experiment, run=run, where=_where(uri, experiment, run))
    run = state["run"]

    status = facts["status"]  # read before the rows: a run that had ended then has no rows after these
    rows = metric_rows(folder, state["rows"])
    for batch, upto in _batches(rows, state["rows"]):
        client.log_batch(run, metrics=[Metric(*metric) for metric in batch])
        remember(rows=upto)
    if status == "RUNNING":
        return state

    client.log_batch(run, tags=[RunTag(key, str(value)) for key, value in facts["tags"].items()])
    _log_dataset(client, run, facts["dataset"])
    for path in [folder / name for name in (names.ADDRESS, names.ENVIRONMENT, *names.OUTCOME)]:
        if path.is_file() and path.name != names.METRIC_ROWS:  # whose rows are MLflow's own metrics by now
            client.log_artifact(run, str(path))
    for path in sorted((folder / names.TRACE).glob("*")):
        client.log_artifact(run, str(path), names.TRACE)
    for path in filter(Path.is_file, files(folder, facts)):
        client.log_artifact(run, str(path), path.parent.relative_to(folder).as_posix())
    for path in sorted(locks.glob("*.txt")):
        client.log_artifact(run, str(path), LOCKS)
    if status == "FINISHED" and all((folder / name).is_file() for name in names.LOGGED):
        logged = log_model(client, state["experiment"], run, facts, folder, locks)
        if not logged and OLD not in state["where"]:
            remember(where=f"{state['where']} {OLD}")
    client.set_terminated(run, status, facts["ended"])
    remember(complete=True)
    return state


def _system_monitor(folder: Path, run: str) -> Any:
    """MLflow's own measurement of this host's CPU, memory, disk, network and GPU, if `tracking.system_seconds` asks."""
    tracking = read_record(folder, names.RUN)["tracking"]
    if not (seconds := tracking.get("system_seconds")):
        return None
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run, seconds, resume_logging=True, tracking_uri=address_of(tracking["uri"]))
    monitor.start()
    return monitor


def experiment_of(client: Any, name: str) -> str:
    """The id of the experiment of this name, which is made where there is none."""
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment else client.create_experiment(name))


def _find_or_create(client: Any, facts: dict[str, Any]) -> tuple[str, str]:
    identity = experiment_of(client, facts["tracking"]["experiment"])
    found = client.search_runs([identity], f"tags.`repro.run` = '{facts['id']}'", max_results=1)
    if found:
        return identity, found[0].info.run_id
    tags = {"repro.run": facts["id"]} | facts["tags"] | _columns(facts)
    name = f"train {str(facts['tags']['repro.address'])[:8]} seed {facts['config'].get('seed')}"
    run = client.create_run(identity, facts["started"], {key: str(value) for key, value in tags.items()}, name)
    return identity, run.info.run_id


def _columns(facts: dict[str, Any]) -> dict[str, Any]:
    """What the columns User, Source and Version of MLflow's pages show, and under which run they show it."""
    columns = {"mlflow.source.name": "samebits train", "mlflow.source.type": "LOCAL"}
    if commit := facts["code"]["commit"]:
        columns["mlflow.source.git.commit"] = commit
    if parent := facts["tracking"].get("parent"):
        columns["mlflow.parentRunId"] = parent
    with suppress(OSError, KeyError):  # as in a container whose user has no name
        columns["mlflow.user"] = getuser()
    return columns


def _batches(rows: list[dict[str, Any]], done: int) -> Iterator[tuple[list[tuple[str, float, int, int]], int]]:
    """Metrics (key, value, time, step) in requests of at most `BATCH`, each with the row count after it."""
    batch: list[tuple[str, float, int, int]] = []
    for number, row in enumerate(rows, start=done):
        metrics = [(key, value, row["time"], row["step"]) for key, value in row["metrics"].items()]
        if batch and len(batch) + len(metrics) > BATCH:
            yield batch, number
            batch = []
        batch += metrics
    if batch:
        yield batch, done + len(rows)


def _log_dataset(client: Any, run: str, dataset: dict[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(
        name=dataset["name"],
        digest=dataset["digest"][:36],  # MLflow's limit; the whole one is in the profile and in repro.data
        source_type="local",
        source=json.dumps({"uri": dataset["name"]}),
        profile=json.dumps(dataset),
    )
    client.log_inputs(run, [DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])


def _where(uri: str, experiment: str, run: str) -> str:
    shown = without_credentials(uri)
    if uri.startswith("http"):
        return f"{shown.rstrip('/')}/#/experiments/{experiment}/runs/{run}"
    return f"{shown}, run {run} (see it with: make ui)"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / names.UPLOAD_LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is uploading this run; wait for it to end") from None
        yield


if __name__ == "__main__":
    follow(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
