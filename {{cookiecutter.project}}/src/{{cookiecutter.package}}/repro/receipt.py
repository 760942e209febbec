"""The receipt of a finished run: what was asked for, what it ran on and what came out, in one statement.

An in-toto Statement (https://in-toto.io/Statement/v1) whose subject is the weights, in canonical JSON (RFC 8785):
the SHA-256 of its bytes is its name. Where a key is configured it is signed in OpenSSH's format (PROTOCOL.sshsig).
"""

import math
import subprocess
from pathlib import Path
from typing import Any

import rfc8785

from .errors import Failure, Refused
from .files import read_json, rename
from .manifest import sha256_file
from .record import ADDRESS, ENVIRONMENT, METRICS, RECEIPT, RUN, SIGNATURE, WEIGHTS, now

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://github.com/org/repro-template/receipt/v1"
SCHEMA = 1
NAMESPACE = "repro-receipt"  # a signature made for another purpose is none of a receipt


def statement(folder: Path, weights: str, trace: str | None) -> dict[str, Any]:
    """What the record in a run directory says, with the SHA-256 of the weights and the trace root."""
    facts, environment = read_json(folder / RUN), read_json(folder / ENVIRONMENT)
    ended = now()
    return {
        "_type": STATEMENT,
        "subject": [{"name": WEIGHTS, "digest": {"sha256": weights}}],
        "predicateType": PREDICATE,
        "predicate": {
            "schema": SCHEMA,
            **read_json(folder / ADDRESS),
            "environment": {name: environment[name] for name in ("environment", "class", "preimage")},
            "config": facts["config"],
            "code": facts["code"],
            "metrics": {name: _exact(value) for name, value in read_json(folder / METRICS).items()},
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
    """Write the receipt into a run directory and return its name."""
    beside = folder / f"{RECEIPT}.part"
    beside.write_bytes(rfc8785.dumps(receipt))
    rename(beside, folder / RECEIPT)
    return sha256_file(folder / RECEIPT)


def require_key(key: str) -> None:
    """Refuse a configured key that is not there, before a run has begun."""
    if key and not Path(key).expanduser().is_file():
        raise Refused(f"receipt.key: {key} is missing; wanted the file of an ssh key, or nothing to leave it unsigned")


def sign(folder: Path, key: str) -> None:
    """Sign the receipt in a run directory; the signature lies beside it.

    Raises:
        Failure: there is no ssh-keygen, or it could not use the key.
    """
    command = ["ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", str(Path(key).expanduser()), str(folder / RECEIPT)]
    (folder / SIGNATURE).unlink(missing_ok=True)  # it would ask whether to overwrite it
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        reason = "" if done.returncode == 0 else " ".join(done.stderr.split())
    except FileNotFoundError:
        reason = "ssh-keygen is not installed"
    if reason:
        raise Failure(f"{folder / RECEIPT} is not signed: {reason}. Sign it with: {' '.join(command)}")
