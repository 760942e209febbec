"""Receipts read and proved: that no byte changed since they were written, and by whom they were signed."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import rfc8785

from ..address import digest
from ..errors import Failure, Refused
from ..files import read_json
from ..manifest import sha256_file
from ..receipt import NAMESPACE, PREDICATE, SCHEMA, STATEMENT
from ..record import PATCH, RECEIPT, RUN, SIGNATURE, WEIGHTS
from ..tracking import QUIET


@dataclass(frozen=True)
class Receipt:
    """A whole receipt: its name (SHA-256), what it states, and where it lies."""

    name: str
    path: Path
    weights: str  # SHA-256
    stated: dict[str, Any]  # the predicate

    @property
    def patch(self) -> Path | None:
        """What the code had beyond its commit; None where it had nothing.

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
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Failure(f"{path}: altered, or no receipt: {type(error).__name__}: {error}") from None
    return Receipt(sha256_file(path), path, weights, stated)


def verify(path: Path, signers: Path | None) -> list[str]:
    """What was proved of a receipt, in lines.

    `signers` is a file of allowed signers as ssh-keygen(1) describes it; without one no signature is asked for.

    Raises:
        Failure: a byte changed, or the signature is missing, another's, or of a signer who is not known.
    """
    receipt = read(path)
    lines = [f"receipt {receipt.name}: whole"]
    weights = receipt.path.with_name(WEIGHTS)
    if weights.is_file():
        seen = sha256_file(weights)
        if seen != receipt.weights:
            raise Failure(f"{weights}: SHA-256 {seen} seen, the receipt states {receipt.weights}")
        lines.append(f"weights {seen}: as stated")
    if receipt.patch:
        lines.append(f"{PATCH}: the uncommitted code that it states")
    if signers:
        lines.append(f"signed by {_signer(receipt.path, signers)}")
    elif receipt.path.with_name(SIGNATURE).is_file():
        lines.append(f"{SIGNATURE}: not checked; name the keys that you trust with --signers FILE")
    else:
        lines.append("not signed")
    return lines


def _signer(path: Path, signers: Path) -> str:
    signature = path.with_name(SIGNATURE)
    for needed in (signers, signature):
        if not needed.is_file():
            raise Refused(f"{needed}: missing; {'allowed signers' if needed == signers else 'a signature'} wanted")
    found = _ssh_keygen("find-principals", "-s", str(signature), "-f", str(signers))
    if found.returncode:
        raise Failure(f"{signature}: signed by a key that is not among {signers}, or not a signature")
    signer = found.stdout.splitlines()[0].split(",")[0]
    options = ("-n", NAMESPACE, "-I", signer, "-s", str(signature), "-f", str(signers))
    checked = _ssh_keygen("verify", *options, standard_input=path.read_bytes())
    if checked.returncode:
        raise Failure(f"{path}: not what {signer} signed: {' '.join(checked.stderr.split())}")
    return signer


def _ssh_keygen(verb: str, *options: str, standard_input: bytes = b"") -> subprocess.CompletedProcess[str]:
    command = ["ssh-keygen", "-Y", verb, *options]
    try:
        done = subprocess.run(command, input=standard_input, capture_output=True)
    except FileNotFoundError:
        raise Refused("ssh-keygen is not installed; it is part of OpenSSH (apt install openssh-client)") from None
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@contextmanager
def located(name: str, uri: Callable[[], str]) -> Iterator[Path]:
    """The run directory or receipt that `name` means: a path, or the id of an MLflow run at `uri`, to be downloaded.

    Raises:
        Refused: it means none of them.
    """
    if Path(name).exists():
        yield Path(name)
    elif re.fullmatch(r"[0-9a-f]{32}", name):
        with TemporaryDirectory() as folder:
            yield _downloaded(name, uri(), folder)
    else:
        raise Refused(f"{name}: no such run directory, receipt or MLflow run id")


def _downloaded(run: str, uri: str, folder: str) -> Path:
    os.environ |= QUIET
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(uri)
        client.get_run(run)
        for artifact in client.list_artifacts(run):
            if artifact.path != WEIGHTS:  # large, and its SHA-256 stands in the receipt
                client.download_artifacts(run, artifact.path, folder)
    except MlflowException as error:
        raise Refused(f"{run}: {' '.join(str(error).split())[:200]}; set MLFLOW_TRACKING_URI to its server") from None
    return Path(folder)


def resumes(folder: Path) -> tuple[int, ...]:
    """After how many steps the run in a directory was resumed, each time."""
    if (folder / RUN).is_file():
        return tuple(read_json(folder / RUN).get("resumed", ()))
    return tuple(read(folder).stated["informational"]["resumed"])
