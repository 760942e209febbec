"""The statement that a finished run makes of itself, and its file; `receipt` reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rfc8785

from ..address.manifest import sha256_file
from ..address.release import library
from ..base.files import durable, exact
from ..base.project import Project
from ..core.errors import UserError
from .names import ADDRESS, ENVIRONMENT, METRICS, RECEIPT, RUN, WEIGHTS
from .reading import read_record
from .record import ENDS, now

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://github.com/org/repro-template/receipt/v1"
SCHEMA = 1


def statement(
    project: Project, folder: Path, weights: str, trace: str | None, proof: Mapping[str, Any]
) -> dict[str, Any]:
    """The receipt of the run in a directory; `weights` is their SHA-256, `trace` the trace root."""
    facts, environment = read_record(folder, RUN), read_record(folder, ENVIRONMENT)
    ended = now()
    return {
        "_type": STATEMENT,
        "subject": subject(weights),
        "predicateType": PREDICATE,
        "predicate": {
            "schema": SCHEMA,
            **read_record(folder, ADDRESS),
            "environment": {name: value for name, value in environment.items() if name != "informational"},
            "config": facts["config"],
            "code": facts["code"],
            "library": library(project).stated(),
            "metrics": exact(read_record(folder, METRICS)),
            "trace": trace,
            "proof": proof,
            **{name: facts[name] for name in ENDS if name in facts},
            "informational": environment["informational"]
            | {
                "started": facts["started"],
                "ended": ended,
                "seconds": (ended - facts["started"]) / 1000,
                "resumed": facts.get("resumed", []),
            },
        },
    }


def subject(weights: str) -> list[dict[str, Any]]:
    """The one thing that a receipt is of."""
    return [{"name": WEIGHTS, "digest": {"sha256": weights}}]


def write(folder: Path, receipt: dict[str, Any]) -> str:
    """Write the receipt into a run directory and return its name.

    Raises:
        UserError: it holds a number that JSON cannot hold exactly.
    """
    try:
        content = rfc8785.dumps(receipt)
    except rfc8785.CanonicalizationError as error:
        raise UserError(f"{folder / RECEIPT}: cannot be written: a record in {folder} was altered: {error}") from None
    with durable(folder / RECEIPT) as beside:
        beside.write_bytes(content)
    return sha256_file(folder / RECEIPT)
