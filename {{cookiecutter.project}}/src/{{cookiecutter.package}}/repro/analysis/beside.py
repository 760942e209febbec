"""The files beside a receipt, compared with what it states of them."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..address.manifest import sha256_file
from ..base.files import read_json
from ..base.text import differences, named, some
from ..core.errors import Failure, Refused
from ..record import chain
from ..record.names import ADDRESS, ENVIRONMENT, METRICS, RECEIPT, RUN, STEP_ROWS, WEIGHTS
from ..record.receipt import Receipt, read


def comparable(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Metrics in words that are equal where their bits are: NaN is equal to no number, and a receipt has words for it.

    Raises:
        ValueError: one is no number.
    """
    return {name: repr(float(value)) for name, value in metrics.items()}


def other_metrics(one: Mapping[str, Any], other: Mapping[str, Any], here: str, there: str) -> str:
    """The metrics that differ in any bit, in words; `here` and `there` say which value is whose. Empty for none."""
    return some([named([each], here, there) for each in differences(comparable(one), comparable(other))])


# A file -> whether it is the one of which the receipt states something.
FILES: dict[str, Callable[[Path, Receipt], bool]] = {
    WEIGHTS: lambda path, run: sha256_file(path) == run.weights,
    METRICS: lambda path, run: comparable(read_json(path)) == comparable(run.stated["metrics"]),
    STEP_ROWS: lambda path, run: chain.root(path, chain.STEP.itemsize) == run.stated["trace"],
    ADDRESS: lambda path, run: read_json(path) == {name: run.stated[name] for name in ("address", "parts", "preimage")},
    ENVIRONMENT: lambda path, run: read_json(path).items() >= run.stated["environment"].items(),
    RUN: lambda path, run: _begun(read_json(path)) == _begun(run.stated | run.stated["informational"]),
}


def _begun(facts: dict[str, Any]) -> dict[str, Any]:
    """What run.json and a receipt both hold."""
    return {name: facts[name] for name in ("config", "code", "started")} | {"resumed": facts.get("resumed", [])}


def is_stated(run: Receipt, name: str) -> bool:
    """Whether the file of this name beside a receipt is the one that it states; not, where there is none."""
    try:
        return FILES[name](run.path.parent / name, run)
    # missing, or not what it once was
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, Refused):
        return False


def held(folder: Path, but: Collection[str] = ()) -> tuple[Receipt | None, tuple[str, ...]]:
    """The receipt in a run directory, if one is there, and what does not agree with it; some files are not compared."""
    if not (folder / RECEIPT).is_file():
        return None, ()
    try:
        run = read(folder)
    except Failure as failure:  # a report tells of such a run, too
        return None, (str(failure).replace(f"{folder}/", ""),)
    others = [name for name in FILES if name not in but and (folder / name).is_file() and not is_stated(run, name)]
    return run, (f"{some(others)}: not as the receipt states: altered, or of another run",) if others else ()
