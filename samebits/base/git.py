"""git, as the project asks it: no other module runs it. Where it refuses another user's folder, the remedy is told."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import RunError, UserError

REFUSED = "safe.directory "  # in git's own words before the folder that it wants to be named


class GitFailed(RunError):
    """git is not installed, or ended with an exit code that nobody wanted: this is no repository, or lacks a commit."""


def git(
    folder: Path,
    *words: str,
    index: Path | None = None,
    given: bytes = b"",
    ends: Sequence[int] = (0,),
    own: bool = False,
) -> bytes:
    """Run git in `folder` and return what it prints, where it ends with one of these exit codes.

    `index` stands for the index of the repository. `own` says that the repository is the one in `folder`, whatever
    variables such as GIT_DIR say, as in a hook of git.

    Raises:
        UserError: the folder belongs to another user, and git reads nothing there.
        GitFailed: git cannot do it.
    """
    kept = {name: value for name, value in os.environ.items() if not (own and name.startswith("GIT_"))}
    env = kept | {"LC_ALL": "C"} | ({"GIT_INDEX_FILE": str(index)} if index else {})
    try:
        # a session of its own has no terminal that git, or what it starts, could ask for a password
        done = subprocess.run(
            ["git", *words], cwd=folder, env=env, input=given, capture_output=True, start_new_session=True
        )
    except FileNotFoundError:
        raise GitFailed("git is not installed") from None
    if done.returncode in ends:
        return done.stdout
    said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
    if REFUSED in said:
        place = said.rpartition(REFUSED)[2]
        raise UserError(
            f"{place}: it belongs to another user, so git reads nothing there, and no receipt could name the code. If "
            f"you trust that user: git config --global --add safe.directory {place}"
        )
    raise GitFailed(f"git {' '.join(words)}: {' '.join(said.split())}")


def git_text(folder: Path, *words: str, ends: Sequence[int] = (0,), own: bool = False) -> str:
    """As `git`, as text without the last newline; a name that is not in UTF-8 keeps its bytes (`os.fsencode`)."""
    return os.fsdecode(git(folder, *words, ends=ends, own=own)).removesuffix("\n")


def is_repository(folder: Path, own: bool = False) -> bool:
    """Whether git knows `folder`, or one above it; `own` as in `git`.

    Raises:
        UserError: it belongs to another user.
    """
    try:
        return bool(git(folder, "rev-parse", "--git-dir", own=own))
    except GitFailed:
        return False
