"""The files beside a receipt, compared with what it states of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..asked.manifest import sha256_file
from ..errors import Refused
from ..files import read_json
from ..records import chain
from ..records.names import ADDRESS, METRICS, STEP_ROWS, WEIGHTS
from ..records.receipt import Receipt


def _comparable(metrics: dict[str, Any]) -> dict[str, str]:
    return {name: repr(float(value)) for name, value in metrics.items()}  # NaN is equal to none


# A file -> whether it is the one of which the receipt states something.
FILES: dict[str, Callable[[Path, Receipt], bool]] = {
    WEIGHTS: lambda path, run: sha256_file(path) == run.weights,
    METRICS: lambda path, run: _comparable(read_json(path)) == _comparable(run.stated["metrics"]),
    STEP_ROWS: lambda path, run: chain.root(path, chain.STEP.itemsize) == run.stated["trace"],
    ADDRESS: lambda path, run: read_json(path) == {name: run.stated[name] for name in ("address", "parts", "preimage")},
}


def is_stated(run: Receipt, name: str) -> bool:
    """Whether the file of this name beside a receipt is the one that it states; not, where there is none."""
    try:
        return FILES[name](run.path.parent / name, run)
    # missing, or not what it once was
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, Refused):
        return False
