"""Checks of a receipt: against itself, against the files beside it, and who signed it."""

from pathlib import Path

from ..errors import Failure
from ..project import Project
from ..records.machinery import judged
from ..records.names import PATCH, STEP_ROWS
from ..records.receipt import Receipt, read
from ..records.signature import standing
from .beside import FILES, is_stated


def report(project: Project, path: Path, signers: Path | None) -> list[str]:
    """The lines that say what was checked of a receipt, with which result, and what could not be checked.

    `signers` is a file of allowed signers as ssh-keygen(1) describes it; without one no signature is asked for.

    Raises:
        Failure: the receipt contradicts itself or a file beside it, or the signature is another's or of a signer who
            is not known.
        Refused: it is no receipt, or the signature is missing.
    """
    receipt = read(path)
    lines = [f"receipt {receipt.name}: consistent in itself", *judged(project, receipt.stated.get("machinery"))]
    signed = standing(receipt.path, signers)
    return [*lines, *_beside(receipt), signed]


def _beside(receipt: Receipt) -> list[str]:
    """What the comparison with the files beside the receipt says, and which could not be compared."""
    stated = [name for name in FILES if name != STEP_ROWS or receipt.stated["trace"]]  # a run without a trace has none
    there = [name for name in stated if (receipt.path.parent / name).is_file()]
    if other := [name for name in there if not is_stated(receipt, name)]:
        raise Failure(f"{receipt.path.parent / other[0]}: altered or another run's; the receipt states another one")
    if receipt.patch:
        there.append(PATCH)
    missing = [name for name in stated if name not in there]
    lines = {
        "as the receipt states": there,
        "not beside the receipt, so what it states of them is unchecked": missing,
    }
    return [f"{', '.join(files)}: {words}" for words, files in lines.items() if files]
