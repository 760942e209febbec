"""steps.csv: what each step logged, as a table that no neutral key changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from samebits.record import names
from samebits.record.curves import write_curves

LOOP = [{"step": step, "time": step, "metrics": {"loss": step / 8, "rate": 1e-30}} for step in range(3)]
MIDWAY = {"step": 1, "time": 9, "metrics": {"epoch": 1.0, "accuracy": 0.5}}
TABLE = "step,loss,rate\n0,0.0,1e-30\n1,0.125,1e-30\n2,0.25,1e-30\n"
WRITTEN: list[tuple[list[dict[str, Any]], str]] = [
    (LOOP, TABLE),
    ([*LOOP[:2], MIDWAY, LOOP[2]], TABLE),  # evaluations midway change no byte
    ([*LOOP, MIDWAY], TABLE),
    ([LOOP[0], MIDWAY | {"metrics": {"skipped": 1}}], "step,loss,rate\n0,0.0,1e-30\n1,,\n"),
    ([], "step\n"),
]


@pytest.mark.parametrize(("rows", "table"), WRITTEN)
def test_table_has_what_the_loop_logged(rows: list[dict[str, Any]], table: str, tmp_path: Path):
    (tmp_path / names.METRIC_ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_curves(tmp_path)
    assert (tmp_path / names.CURVES).read_text() == table
