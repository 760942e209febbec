"""Reading of the records in a run directory, each held to the shape that its readers rely on."""

import re
from pathlib import Path
from typing import Any

from ..base.files import parse_json, read_json, read_text
from . import names

ENVIRONMENT = {"environment": str, "class": str, "preimage": dict, "before?": [dict], "informational": dict}
NUMBER = (float, re.compile("-?inf|nan"))  # JSON has no word for the latter; see `receipt`
CODE = {"commit": (str, None), "patch": (str, None)}
ADDRESS = {
    "address": str,
    "parts": {"data": str, ...: str},
    "preimage": {
        "config": dict,
        "code": dict,
        "data": {"files": [{"path": str, "sha256": str}]},
        "lock": dict,
        "seed": int,
        "world_size?": int,
    },
}

# File -> the keys without which it cannot be used. It may hold more.
SHAPES = {
    names.ADDRESS: ADDRESS,
    names.ENVIRONMENT: ENVIRONMENT,
    names.RUN: {
        "id": str,
        "started": int,
        "ended?": (int, None),
        "status": str,
        "config": dict,
        "code": CODE,
        "environments?": [str],
        "resumed?": [int],
        "tags": {"repro.address": str},
        "tracking": {"uri": str, "experiment": str},
        "dataset": {"name": str, "digest": str},
        "shapes?": {...: [{"name": str, "dtype": str, "shape": [int]}]},
    },
    names.METRICS: {...: float},
    names.TENSOR_COLUMNS: [re.compile("(output|gradient|weights|optimizer) .*")],
}
METRIC_ROW = {"step": int, "time": int, "metrics": {...: float}}
UPLOAD = {"id": str, "uri": str, "rows": int, "complete": bool, "run?": str, "where?": str}


def read_record(folder: Path, name: str) -> Any:
    """What the record of this name in a run directory holds.

    Raises:
        Refused: it is missing, not JSON, or lacks what its readers need.
    """
    return read_json(folder / name, SHAPES[name])


def metric_rows(folder: Path, done: int = 0) -> list[dict[str, Any]]:
    """The whole rows of metrics.jsonl after the first `done`; a line still being written has no newline yet.

    Raises:
        Refused: a whole line is no row.
    """
    path = folder / names.METRIC_ROWS
    lines = read_text(path).split("\n")[:-1]
    return [
        parse_json(line, f"{path}, line {number}", METRIC_ROW) for number, line in enumerate(lines[done:], done + 1)
    ]
