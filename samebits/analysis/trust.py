"""What a record of others brings along: its code is shown, and run only where the user allows it."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..base.git import GitFailed, git, git_text, is_repository
from ..base.project import Project
from ..core.errors import RunError, UserError
from ..record.code_state import code_state
from ..record.signature import standing


@dataclass(frozen=True)
class Trust:
    """What the user allows: code signed by a key in the file `signers`, or `run_patch`: code of anyone."""

    signers: Path | None = None
    run_patch: bool = False


def require_trusted(
    project: Project, receipt: Path, patch: Path | None, trust: Trust, report: Callable[[str], None]
) -> None:
    """Show the patch that is to be run with a record, and who signed its receipt; refuse it if nobody answers for it.

    A record without a patch runs a commit of this repository. A patch that is, to the byte, what this work tree
    holds uncommitted is the user's own.

    Raises:
        UserError: the patch is another one, and neither signed nor allowed; or the signature is missing.
        RunError: the receipt is not signed by one of the signers.
    """
    own = patch is None or hashlib.sha256(patch.read_bytes()).hexdigest() == code_state(project)[0]["patch"]
    if trust.signers or not own:
        report(f"{receipt}: {standing(receipt, trust.signers)}")
    if patch is None or own:
        return
    report("\n".join([f"{patch}, uncommitted code that is run with it:", *_shown(project, patch)]))
    if not (trust.signers or trust.run_patch):
        raise UserError(
            f"{patch}: code that this work tree does not hold, not run: read it, then allow it with --run-patch, or "
            f"with --signers FILE of the keys that you trust"
        )


def _shown(project: Project, patch: Path) -> list[str]:
    """A line per file: how many lines are added and removed. git reads the patch, as it does to apply it."""
    # in a folder below the top, git would leave out the files of others
    inside = is_repository(project.root)
    top = Path(git_text(project.root, "rev-parse", "--show-toplevel")) if inside else project.root
    try:
        listed = git(top, "apply", "--numstat", str(patch.absolute())).decode(errors="replace")
    except GitFailed as failed:
        raise RunError(f"{patch}: no patch that git can read: {failed}") from None
    rows = (line.split("\t", 2) for line in listed.splitlines())
    return [f"  {name}: {'binary' if added == '-' else f'+{added} -{removed}'}" for added, removed, name in rows]
