"""The model of a run as MLflow's own thing: a LoggedModel, with its signature, that mlflow.pytorch.load_model loads.

Its weights are those of model.safetensors, which remains the run's one outcome: tags tell its digest.
"""

import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..address.locks import locks_here
from ..record import names
from ..record.reading import metric_rows

NAME = "model"  # in MLflow's lists
DATA, ENVIRONMENT, REQUIREMENTS = "data", "python_env.yaml", "requirements.txt"
LOADER = "mlflow.pytorch"


def log_model(client: Any, experiment: str, run: str, facts: dict[str, Any], folder: Path, locks: Path) -> bool:
    """Upload the model of the finished run recorded in `folder`, once, however often this is called.

    False where the server has no place for it.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND, ErrorCode

    identity = facts["id"]
    try:
        found = client.search_logged_models([experiment], f"tags.`repro.run` = '{identity}'", max_results=1)
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(ENDPOINT_NOT_FOUND):
            raise
        return False
    tags = {"repro.run": identity} | {name: str(value) for name, value in facts["tags"].items()}
    model = found[0] if found else client.create_logged_model(experiment, NAME, run, tags, model_type="pytorch")
    if model.status == LoggedModelStatus.READY:
        return True
    outputs = client.get_run(run).outputs
    if not outputs or model.model_id not in {each.model_id for each in outputs.model_outputs}:  # a second time it fails
        client.log_outputs(run, [LoggedModelOutput(model.model_id, step=0)])
    client.log_model_artifact(model.model_id, str(folder / names.PICKLED), DATA)
    client.log_model_artifact(model.model_id, str(folder / names.CODE))
    with tempfile.TemporaryDirectory() as beside:  # in `folder`, a kill would leave stray files
        _describe(Path(beside), model, run, facts, locks)
        client.log_model_artifacts(model.model_id, beside)
    for row in metric_rows(folder)[-1:]:  # those that the run ended with; the run has them already, and keeps them once
        when, step = row["time"], row["step"]
        ours = {"model_id": model.model_id, "run_id": run}
        client.log_batch(run, [Metric(key, value, when, step, **ours) for key, value in row["metrics"].items()])
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return True


def _describe(target: Path, model: Any, run: str, facts: dict[str, Any], locks: Path) -> None:
    """Write the files by which MLflow knows how to load the model."""
    from mlflow import pyfunc
    from mlflow.models import Model

    (target / DATA).mkdir()
    (target / DATA / "pickle_module_info.txt").write_text("mlflow.pytorch.pickle_module")
    (target / REQUIREMENTS).write_text("".join(path.read_text() for path in locks_here(locks)))
    python = platform.python_version()
    (target / ENVIRONMENT).write_text(
        f"python: {python}\nbuild_dependencies: [pip]\ndependencies: [-r {REQUIREMENTS}]\n"
    )
    described = Model(
        artifact_path=model.artifact_location,
        run_id=run,
        model_id=model.model_id,
        model_uuid=model.model_id,
        signature=_signature(facts.get("shapes")),
        metadata=facts["tags"],
    )
    described.add_flavor("pytorch", pytorch_version=version("torch"), model_data=DATA, code=names.CODE)
    pyfunc.add_to_model(described, LOADER, data=DATA, code=names.CODE, python_env=ENVIRONMENT)
    described.save(str(target / "MLmodel"))


def _signature(seen: dict[str, list[dict[str, Any]]] | None) -> Any:
    """MLflow's signature; None where NumPy has no type for an input, as for bfloat16, or nothing was seen."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(tensors: list[dict[str, Any]]) -> Any:
        alone = len(tensors) == 1
        try:
            specs: list[Any] = [
                TensorSpec(np.dtype(each["dtype"]), tuple(each["shape"]), None if alone else each["name"])
                for each in tensors
            ]
        except TypeError:
            return None
        return Schema(specs) if specs else None

    sides = {side: schema(tensors) for side, tensors in (seen or {}).items()}
    return ModelSignature(**sides) if sides.get("inputs") else None
