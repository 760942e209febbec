"""The runs that a command names: a run directory, a receipt, an archive, an MLflow run or experiment."""

import os
import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..base.redact import without_credentials
from ..core.errors import UserError
from ..record.names import FILES, TRACE, WEIGHTS
from ..tracking.tracking import QUIET
from . import archive

# What is downloaded of a run, and no other path that a server names. Weights are large; the receipt has their SHA-256.
KEPT = FILES - {WEIGHTS} | {TRACE}
EXPERIMENT = "experiment:"  # before the name of an experiment
FINISHED = "attributes.status = 'FINISHED'"
NEXT = "set MLFLOW_TRACKING_URI to its server"


@contextmanager
def located(name: str, uri: Callable[[], str], kept: Set[str] = KEPT) -> Iterator[Path]:
    """The run directory or receipt that `name` means: a path, or the id of an MLflow run at `uri`, to be downloaded.

    Only what has one of the names `kept` is downloaded. `FILE.tar:2` is the second run in an archive of
    `samebits bundle`.

    Raises:
        UserError: it means none of them.
    """
    path, _, number = name.rpartition(":")
    if archive.is_archive(Path(path or name)):
        with TemporaryDirectory() as folder:
            _unpack(Path(path or name), number if path else "", Path(folder), kept)
            yield Path(folder)
    elif name and Path(name).exists():
        yield Path(name)
    elif re.fullmatch(r"[0-9a-f]{32}", name):
        with TemporaryDirectory() as folder:
            with requested(name):
                _download(name, uri(), folder, kept)
            yield Path(folder)
    else:
        raise UserError(f"{name or repr(name)}: no such run directory, receipt or MLflow run id")


def listed(name: str, uri: Callable[[], str]) -> list[str]:
    """The names of runs that `name` means: the finished ones of an experiment at `uri`, first those that began first.

    Whatever is no `experiment:NAME` is the name of a run itself.

    Raises:
        UserError: there is no such experiment, or no finished run in it.
    """
    if not name.startswith(EXPERIMENT):
        return [name]
    with requested(name):
        from mlflow import MlflowClient

        client = MlflowClient(uri())
        experiment = client.get_experiment_by_name(name.removeprefix(EXPERIMENT))
        if experiment is None or experiment.lifecycle_stage != "active":
            raise UserError(f"{name}: MLflow has no such experiment; make ui lists those there are, or {NEXT}")
        page = client.search_runs([experiment.experiment_id], FINISHED)
        found = list(page)
        while page.token:
            page = client.search_runs([experiment.experiment_id], FINISHED, page_token=page.token)
            found += page
    if not found:
        raise UserError(f"{name}: no finished run is in it")
    return [run.info.run_id for run in sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))]


def _unpack(path: Path, run: str, folder: Path, kept: Set[str]) -> None:
    runs = archive.runs_in(path)
    if not run and len(runs) == 1:
        run = runs[0]
    if run not in runs:
        seen = f"run {run!r} asked for, " if run else ""
        raise UserError(f"{path}: {seen}{', '.join(runs) or 'no run'} seen; name one of them: {path}:1")
    archive.unpack(path, run, folder, kept)


@contextmanager
def requested(name: str) -> Iterator[None]:
    """What MLflow says against a question about a run or an experiment, in a line."""
    os.environ |= QUIET
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        said = without_credentials(" ".join(str(error).split()))
        raise UserError(f"{name}: {said[:200]}; {NEXT}") from None


def _download(run: str, uri: str, folder: str, kept: Set[str]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    client.get_run(run)
    for artifact in client.list_artifacts(run):
        if artifact.path in kept:
            client.download_artifacts(run, artifact.path, folder)
