"""Checks of a receipt: that no byte changed since it was written, and who signed it."""

from pathlib import Path

from ..asked.manifest import sha256_file
from ..errors import Failure
from ..project import Project
from ..records.machinery import judged
from ..records.names import PATCH, SIGNATURE, WEIGHTS
from ..records.receipt import read
from ..records.signature import signer


def report(project: Project, path: Path, signers: Path | None) -> list[str]:
    """The lines that say what was checked of a receipt, and with which result.

    `signers` is a file of allowed signers as ssh-keygen(1) describes it; without one no signature is asked for.

    Raises:
        Failure: a byte changed, or the signature is missing, another's, or of a signer who is not known.
    """
    receipt = read(path)
    lines = [f"receipt {receipt.name}: whole", *judged(project, receipt.stated.get("machinery"))]
    weights = receipt.path.with_name(WEIGHTS)
    if weights.is_file():
        seen = sha256_file(weights)
        if seen != receipt.weights:
            raise Failure(f"{weights}: SHA-256 {seen} seen, the receipt states {receipt.weights}")
        lines.append(f"weights {seen}: as stated")
    if receipt.patch:
        lines.append(f"{PATCH}: the uncommitted code that it states")
    if signers:
        lines.append(f"signed by {signer(receipt.path, signers)}")
    elif receipt.path.with_name(SIGNATURE).is_file():
        lines.append(f"{SIGNATURE}: not checked; name the keys that you trust with --signers FILE")
    else:
        lines.append("not signed")
    return lines
