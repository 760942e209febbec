"""Checks of a receipt: against itself, against the files beside it, and who signed it."""

from pathlib import Path

from ..address.judged import judged
from ..base.project import Project
from ..base.shape import plain
from ..core.errors import RunError
from ..record import proved, started
from ..record.names import CURVES, METRIC_ROWS, PATCH, TENSOR_ROWS
from ..record.receipt import Receipt, read
from ..record.signature import standing
from ..record.view import is_stated, stated_files

DERIVED = "address, environment and class follow from their preimages"
UNSTATED = METRIC_ROWS, CURVES, TENSOR_ROWS


def report(project: Project, path: Path, signers: Path | None) -> list[str]:
    """The lines that say what was checked of a receipt, with which result, and what could not be checked.

    `signers` is a file of allowed signers as ssh-keygen(1) describes it; without one no signature is asked for.

    Raises:
        RunError: the receipt contradicts itself or a file beside it, or the signature is another's or of a signer who
            is not known.
        UserError: it is no receipt, or the signature is missing.
    """
    receipt = read(path)
    itself = f"receipt {receipt.name}: consistent in itself: {DERIVED}"
    signed = standing(receipt.path, signers)
    before = started.words(receipt.stated["config"])
    began = [f"started from {plain(before)}: check that receipt, too"] if before else []
    proof = [f"proof: {proved.words(stated)}"] if (stated := receipt.stated.get("proof")) else []
    return [itself, *proof, *began, *judged(project, receipt.stated), *_beside(receipt), signed]


def _beside(receipt: Receipt) -> list[str]:
    """Which files beside the receipt are as it states, and which could not be compared, in one sentence."""
    stated = stated_files(receipt)
    there = [name for name in stated if (receipt.path.parent / name).is_file()]
    if other := [name for name in there if not is_stated(receipt, name)]:
        raise RunError(f"{receipt.path.parent / other[0]}: altered or another run's; the receipt states another one")
    if receipt.patch:
        there.append(PATCH)
    missing = [name for name in stated if name not in there]
    folder = receipt.path.parent
    parts = {
        "as the receipt states": there,
        "not beside the receipt, so what it states of them is unchecked": missing,
        "unchecked, because no receipt states them": [name for name in UNSTATED if (folder / name).is_file()],
    }
    return ["; ".join(f"{', '.join(files)}: {words}" for words, files in parts.items() if files)]
