"""The runs that a command names: a run directory, a receipt, or the id of an MLflow run."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import Refused
from ..records.names import FILES, TRACE, WEIGHTS
from ..records.tracking import QUIET

# What is downloaded of a run, and no other path that a server names. Weights are large; the receipt has their SHA-256.
KEPT = FILES - {WEIGHTS} | {TRACE}


@contextmanager
def located(name: str, uri: Callable[[], str]) -> Iterator[Path]:
    """The run directory or receipt that `name` means: a path, or the id of an MLflow run at `uri`, to be downloaded.

    Raises:
        Refused: it means none of them.
    """
    if Path(name).exists():
        yield Path(name)
    elif re.fullmatch(r"[0-9a-f]{32}", name):
        with TemporaryDirectory() as folder:
            yield _downloaded(name, uri(), folder)
    else:
        raise Refused(f"{name}: no such run directory, receipt or MLflow run id")


def _downloaded(run: str, uri: str, folder: str) -> Path:
    os.environ |= QUIET
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(uri)
        client.get_run(run)
        for artifact in client.list_artifacts(run):
            if artifact.path in KEPT:
                client.download_artifacts(run, artifact.path, folder)
    except MlflowException as error:
        raise Refused(f"{run}: {' '.join(str(error).split())[:200]}; set MLFLOW_TRACKING_URI to its server") from None
    return Path(folder)
