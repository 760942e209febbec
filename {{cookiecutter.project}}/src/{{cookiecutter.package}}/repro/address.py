"""The content address: one hash over what was asked for; its preimage gives a difference its name."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

from . import manifest
from .errors import Refused
from .settings import Settings

PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = PACKAGE.parents[1]
LOCKS = "requirements"

# The lab launches runs and reads their records; no run imports it, so it cannot change one.
OUTSIDE_THE_RUN = ("repro/lab/", "repro/cli.py")


@dataclass(frozen=True)
class ContentAddress:
    """`digest` is the SHA-256 of the canonical JSON of `preimage`; `parts` has one digest per ingredient."""

    preimage: dict[str, Any]

    @property
    def digest(self) -> str:
        return digest(self.preimage)

    @property
    def parts(self) -> dict[str, str]:
        return {name: digest(value) for name, value in self.preimage.items()}

    def record(self) -> dict[str, Any]:
        """What `address.json` holds."""
        return {"address": self.digest, "parts": self.parts, "preimage": self.preimage}


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON (RFC 8785) of a JSON-compatible value.

    Raises:
        Refused: a number that JSON cannot hold exactly, such as an integer beyond 2**53.
    """
    try:
        return hashlib.sha256(rfc8785.dumps(value)).hexdigest()
    except rfc8785.CanonicalizationError as error:
        raise Refused(f"canonical JSON cannot hold a value exactly: {error}") from None


def code(package: Path = PACKAGE) -> dict[str, str]:
    """SHA-256 of every Python file that a run may import, by its path relative to the package."""
    paths = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    return {
        name: manifest.sha256_file(path) for name, path in sorted(paths.items()) if not name.startswith(OUTSIDE_THE_RUN)
    }


def locks(project: Path = PROJECT) -> dict[str, str]:
    """SHA-256 of every lock's requirements, by file name; comments carry names and change nothing."""
    found = {}
    for path in sorted((project / LOCKS).glob("*.txt")):
        lines = (line.split(" #")[0].strip() for line in path.read_text().splitlines())
        pins = "\n".join(line for line in lines if line and not line.startswith("#"))
        found[path.name] = hashlib.sha256(pins.encode()).hexdigest()
    if not found:
        raise Refused(f"{project / LOCKS}: no lock seen, {LOCKS}/*.txt wanted. Restore them from git, or: make lock")
    return found


def content_address(config: Settings, data: dict[str, Any], world_size: int) -> ContentAddress:
    """What `config` asks for, given the data's manifest.

    `world_size` enters only with `parallel.reduce: ddp`, where the bits depend on it.
    """
    preimage = {
        "config": config.addressed(),
        "code": code(),
        "data": data,
        "lock": locks(),
        "seed": config.seed,
    }
    if config.parallel.reduce == "ddp":
        preimage["world_size"] = world_size
    return ContentAddress(preimage)
