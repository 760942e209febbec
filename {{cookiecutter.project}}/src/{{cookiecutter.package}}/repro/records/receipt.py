"""The receipt of a finished run: its content address, its numeric environment and its outcome, in one statement.

An in-toto Statement (https://in-toto.io/Statement/v1) whose subject is the weights, in canonical JSON (RFC 8785):
the SHA-256 of its bytes is its name.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

from ..asked.address import digest
from ..asked.manifest import sha256_file
from ..errors import Failure, Refused
from ..files import rename
from ..shape import faults, unreadable
from ..project import Project
from .machinery import machinery
from .names import ADDRESS, ENVIRONMENT, METRICS, PATCH, RECEIPT, RUN, WEIGHTS
from .reading import STATED, read_record
from .record import now

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://github.com/org/repro-template/receipt/v1"
SCHEMA = 1


def statement(project: Project, folder: Path, weights: str, trace: str | None) -> dict[str, Any]:
    """The receipt of the run in a directory; `weights` is their SHA-256, `trace` the trace root."""
    facts, environment = read_record(folder, RUN), read_record(folder, ENVIRONMENT)
    ended = now()
    return {
        "_type": STATEMENT,
        "subject": [{"name": WEIGHTS, "digest": {"sha256": weights}}],
        "predicateType": PREDICATE,
        "predicate": {
            "schema": SCHEMA,
            **read_record(folder, ADDRESS),
            "environment": {name: environment[name] for name in ("environment", "class", "preimage")},
            "config": facts["config"],
            "code": facts["code"],
            "machinery": machinery(project).stated(),
            "metrics": {name: _exact(value) for name, value in read_record(folder, METRICS).items()},
            "trace": trace,
            "informational": environment["informational"]
            | {
                "started": facts["started"],
                "ended": ended,
                "seconds": (ended - facts["started"]) / 1000,
                "resumed": facts.get("resumed", []),
            },
        },
    }


def _exact(value: float) -> float | str:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else repr(value)


def write(folder: Path, receipt: dict[str, Any]) -> str:
    """Write the receipt into a run directory and return its name.

    Raises:
        Refused: it holds a number that JSON cannot hold exactly.
    """
    beside = folder / f"{RECEIPT}.part"
    try:
        beside.write_bytes(rfc8785.dumps(receipt))
    except rfc8785.CanonicalizationError as error:
        raise Refused(f"{folder / RECEIPT}: cannot be written: a record in {folder} was altered: {error}") from None
    rename(beside, folder / RECEIPT)
    return sha256_file(folder / RECEIPT)


@dataclass(frozen=True)
class Receipt:
    """A receipt that was read and found whole. Its name is its SHA-256."""

    name: str
    path: Path
    weights: str  # SHA-256
    stated: dict[str, Any]  # the predicate

    @property
    def patch(self) -> Path | None:
        """The patch of uncommitted code that the receipt names; None where there was none.

        Raises:
            Failure: it is lost, or not the one that the receipt names.
        """
        wanted = self.stated["code"]["patch"]
        if not wanted:
            return None
        path = self.path.with_name(PATCH)
        if not path.is_file() or sha256_file(path) != wanted:
            raise Failure(f"{path}: missing or altered; the receipt is of uncommitted code and names SHA-256 {wanted}")
        return path


def read(path: Path) -> Receipt:
    """The receipt in a file, or in a run directory.

    Raises:
        Refused: there is none.
        Failure: it is not as it was written.
    """
    path = path / RECEIPT if path.is_dir() else path
    if not path.is_file():
        raise Refused(f"{path}: missing; the receipt of a finished run is wanted")
    content = path.read_bytes()
    try:
        statement = json.loads(content)
        if statement["_type"] != STATEMENT or statement["predicateType"] != PREDICATE:
            raise Refused(f"{path}: {statement['predicateType']} seen, {PREDICATE} wanted")
        stated = statement["predicate"]
        if stated["schema"] != SCHEMA:
            raise Refused(f"{path}: schema {stated['schema']} seen, {SCHEMA} wanted; use the template's other version")
        if fault := unreadable(statement) or next(faults(stated, STATED), None):
            raise ValueError(fault)
        environment = stated["environment"]
        hashes = {
            "address": (stated["address"], digest(stated["preimage"])),
            **{f"parts.{name}": (stated["parts"][name], digest(part)) for name, part in stated["preimage"].items()},
            "environment": (environment["environment"], digest(environment["preimage"])),
        }
        altered = [name for name, (written, computed) in hashes.items() if written != computed]
        if altered or rfc8785.dumps(statement) != content:
            what = f"{altered[0]} is not the hash of its preimage" if altered else "it is not canonical JSON"
            raise Failure(f"{path}: altered: {what}")
        weights = statement["subject"][0]["digest"]["sha256"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Failure(f"{path}: altered, or no receipt: {type(error).__name__}: {error}") from None
    return Receipt(sha256_file(path), path, weights, stated)


def resumes(folder: Path) -> tuple[int, ...]:
    """After how many steps the run in a directory was resumed, each time."""
    if (folder / RUN).is_file():
        return tuple(read_record(folder, RUN).get("resumed", ()))
    return tuple(read(folder).stated["informational"]["resumed"])
