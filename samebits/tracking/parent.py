"""MLflow's run of a sweep, whose children the runs of the sweep are; in a process of its own, as all that asks MLflow.

python -m samebits.tracking.parent JSON      prints its id; nobody types it
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from ..base.loading import unsearched
from ..base.redact import without_credentials
from ..record.record import now
from .tracking import QUIET, address_of, experiment_of, require_store


def keep(wanted: Mapping[str, Any]) -> str:
    """Find the run of a sweep, or make it; give it its status and its files. Returns its id."""
    uri = address_of(wanted["uri"])
    require_store(uri)
    os.environ |= QUIET
    with unsearched():
        from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment, sweep = experiment_of(client, wanted["experiment"]), wanted["sweep"]
    if found := client.search_runs([experiment], f"tags.`repro.sweep` = '{sweep}'", max_results=1):
        run = found[0].info.run_id
    else:
        tags = {"repro.sweep": sweep, "mlflow.source.name": "samebits sweep", "mlflow.source.type": "LOCAL"}
        name = f"sweep {sweep[:8]} {' '.join(wanted['keys'])}"
        run = client.create_run(experiment, now(), tags, name).info.run_id
    for file in wanted["files"]:
        client.log_artifact(run, file)
    if wanted["status"] == "RUNNING":
        client.update_run(run, "RUNNING")
    else:
        client.set_terminated(run, wanted["status"])
    return str(run)


if __name__ == "__main__":
    try:
        print(keep(json.loads(sys.argv[1])))
    except Exception as error:  # MLflow raises its own, requests', SQLAlchemy's …: all mean "not now"
        sys.exit(without_credentials(" ".join(str(error).split()))[:300] or type(error).__name__)
