"""steps.csv: what each step logged, as a table that no neutral key changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from project.repro.record import names
from project.repro.record.curves import write_curves

LOOP = [{"step": step, "time": step, "metrics": {"loss": step / 8, "rate": 1e-30}} for step in range(3)]
MIDWAY = {"step": 1, "time": 9, "metrics": {"epoch": 1.0, "accuracy": 0.5}}
TABLE = """step,loss,rate
0,0.0,1e-30
1,0.125,1e-30
2,0.25,1e-30
"""


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / names.METRIC_ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_curves(folder)
    return (folder / names.CURVES).read_text()


@pytest.mark.parametrize("rows", [LOOP, [*LOOP[:2], MIDWAY, LOOP[2]], [*LOOP, MIDWAY]])
def test_evaluations_midway_change_no_byte(rows: list[dict[str, Any]], tmp_path: Path):
    assert written(tmp_path, rows) == TABLE


def test_step_without_a_number_leaves_its_place_empty(tmp_path: Path):
    skipped = [LOOP[0], {"step": 1, "time": 1, "metrics": {"skipped": 1}}]
    assert written(tmp_path, skipped) == "step,loss,rate\n0,0.0,1e-30\n1,,\n"


def test_run_that_logged_nothing_has_a_table_of_nothing(tmp_path: Path):
    assert written(tmp_path, []) == "step\n"
