"""steps.csv: the numbers of every step as a table, for `dvc plots` and spreadsheets."""

import csv
from pathlib import Path

from . import names
from .reading import metric_rows


def write_curves(folder: Path) -> None:
    """Make the table of the run in `folder` from its metrics.jsonl.

    Its columns are the step and the names that the first row has. Numbers that are logged now and then, as by an
    evaluation, are left out: how often is a neutral key, and the table has the same bytes for any value of such keys.
    """
    rows = metric_rows(folder)
    columns = list(rows[0]["metrics"]) if rows else []
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row["metrics"])
    with (folder / names.CURVES).open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *columns])
        table.writerows([step, *(logged.get(name, "") for name in columns)] for step, logged in sorted(steps.items()))
