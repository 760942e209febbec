"""The receipt of a finished run: its content address, its numeric environment and its outcome, in one statement.

An in-toto Statement (https://in-toto.io/Statement/v1) whose subject is the weights, in canonical JSON (RFC 8785):
the SHA-256 of its bytes is its name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import rfc8785
from pydantic import StringConstraints

from ..address.address import digest
from ..address.manifest import sha256_file
from ..base.files import require
from ..base.forms import ABSENT, Form, unreadable
from ..base.text import flatten, some
from ..core.errors import RunError, UserError
from .classes import RELEASED, class_of, described
from .names import CONTRADICTION, PATCH, RECEIPT, WEIGHTS
from .reading import Address, Best, Code, Environment, Number, Proof, Stopped
from .started import begun_with
from .statement import PREDICATE, SCHEMA, STATEMENT, subject

RELEASED_WITH = "2.13.0"  # the release of torch whose arithmetic is `RELEASED`
OTHERWISE = "or another version of the template made it"


class Informational(Form):
    """What changes no bit: after how many steps the run was resumed."""

    resumed: list[int]


class Stated(Address):
    """The predicate of a receipt."""

    code: Code
    config: dict[str, Any]
    environment: Environment
    metrics: dict[str, Number]
    trace: Annotated[str, StringConstraints(pattern="^[0-9a-f]{48}$")] | None
    proof: Proof = ABSENT
    stopped: Stopped = ABSENT
    best: Best = ABSENT
    informational: Informational


@dataclass(frozen=True)
class Receipt:
    """A receipt that was read and found whole. Its name is its SHA-256."""

    name: str
    path: Path
    weights: str  # SHA-256
    stated: dict[str, Any]  # the predicate

    @property
    def patch(self) -> Path | None:
        """The patch of uncommitted code that the receipt names; see `patch_beside`."""
        return patch_beside(self.path, self.stated["code"]["patch"])


def patch_beside(path: Path, wanted: str | None) -> Path | None:
    """The patch of uncommitted code beside a record, which names its SHA-256; None where there was none.

    Raises:
        RunError: it is lost, or another one.
    """
    if not wanted:
        return None
    patch = path.with_name(PATCH)
    if not patch.is_file() or sha256_file(patch) != wanted:
        raise RunError(
            f"{patch}: missing or altered; the {path.stem} is of uncommitted code and names SHA-256 {wanted}"
        )
    return patch


def read(path: Path) -> Receipt:
    """The receipt in a file, or in a run directory.

    Raises:
        UserError: there is none, or a key of it is none that a run writes.
        RunError: it is not as it was written.
    """
    path = path / RECEIPT if path.is_dir() else path
    if (contradiction := path.with_name(CONTRADICTION)).is_file():
        raise RunError(f"{contradiction}: the run contradicts itself, and such a run has no receipt; train again")
    if not path.is_file():
        raise UserError(f"{path}: missing; the receipt of a finished run is wanted")
    content = path.read_bytes()
    try:
        statement = json.loads(content, parse_int=_integer)
        if statement["_type"] != STATEMENT or statement["predicateType"] != PREDICATE:
            raise UserError(f"{path}: {statement['predicateType']} seen, {PREDICATE} wanted")
        stated = statement["predicate"]
        if stated["schema"] != SCHEMA:
            raise UserError(
                f"{path}: schema {stated['schema']} seen, {SCHEMA} wanted; use the template's other version"
            )
        if fault := unreadable(statement):
            raise ValueError(fault)
        require(stated, str(path), Stated, "")
        hashes = {
            "address": (stated["address"], digest(stated["preimage"])),
            **{f"parts.{name}": (stated["parts"][name], digest(part)) for name, part in stated["preimage"].items()},
        }
        requested = flatten(stated["preimage"]["config"]) | {"seed": stated["preimage"]["seed"]}
        requested |= begun_with(stated["preimage"], stated["config"])
        others = [key for key, value in requested.items() if stated["config"].get(key) != value]
        faults = _faults_of_environment(stated["environment"], requested, stated["config"].get("determinism.relax"))
        if stated["parts"].keys() != stated["preimage"].keys():
            faults.append("its parts are not those of its preimage")
        altered = [
            *(f"{name} is not the hash of its preimage" for name, (seen, wanted) in hashes.items() if seen != wanted),
            *(f"its config states another {key} than its preimage" for key in others),
            *faults,
            *(["it is not canonical JSON"] if rfc8785.dumps(statement) != content else []),
        ]
        if altered:
            raise RunError(f"{path}: altered: {altered[0]}")
        weights = statement["subject"][0]["digest"]["sha256"]
        if statement["subject"] != subject(weights):
            seen = some([str(each["name"]) for each in statement["subject"]])
            raise RunError(f"{path}: subjects {seen!r} seen, {WEIGHTS} alone with its SHA-256 wanted: altered")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise RunError(f"{path}: altered, or no receipt: {type(error).__name__}: {error}") from None
    return Receipt(sha256_file(path), path, weights, stated)


def _faults_of_environment(stated: dict[str, Any], requested: dict[str, Any], relax: Any) -> list[str]:
    """In what a receipt's environment does not follow from its own preimages, and from the config `requested` for."""
    environment, before = stated["preimage"], stated.get("before", [])
    plain = requested.get("compute.precision", "float32") == "float32" and not requested.get("compute.compile")
    derived = described(environment, plain, before)
    faults = []
    if stated["environment"] != derived["environment"]:
        faults.append("environment is not the hash of its preimage")
    if stated["class"] not in (derived["class"], derived["class"] if before else _could_be(environment, plain)):
        faults.append(f"environment.class is {stated['class']}, {derived['class']} follows from it, {OTHERWISE}")
    if sorted(relax or ()) != (environment if not before else before[0]).get("relaxed", []):
        faults.append(f"its config relaxes other flags than its environment, {OTHERWISE}")
    return faults


def _could_be(environment: dict[str, Any], plain: bool) -> str:
    """The class of an environment whose release of torch has another arithmetic, which is not known here."""
    cpu, torch = ({} if not isinstance(each := environment.get(name), dict) else each for name in ("cpu", "torch"))
    known = str(torch.get("version")).partition("+")[0] == RELEASED_WITH
    return class_of(environment, plain, RELEASED if known else str(cpu.get("arithmetic")))


def _integer(text: str) -> float:
    """A whole number as it was written: canonical JSON writes 1e20, too, without a point."""
    number = int(text)
    return number if abs(number) < 2**53 else float(number)
