"""The state of the project's code in git: its commit, and a patch of all uncommitted changes."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..base.git import GitFailed, git, git_text, is_repository
from ..base.project import Project
from ..base.redact import secret_in
from ..base.text import some
from ..core.errors import UserError
from .names import PATCH

# The files that a run reads and git keeps. No other file of the work tree reaches a record.
READ = ("src", "vendor", "requirements", "params.yaml", "pyproject.toml", "dvc.yaml", ":(glob)**/*.dvc")


def code_state(project: Project) -> tuple[dict[str, Any], bytes]:
    """The project's git commit, and a patch of the uncommitted changes in files that a run reads.

    The facts are {"commit", "dirty", "patch": SHA-256}; all None outside git.

    Raises:
        UserError: git does not read a folder of another user.
    """
    try:
        head = git_text(project.root, "rev-parse", "HEAD")
        patch = _patch(project)
    except (OSError, GitFailed):
        return {"commit": None, "dirty": None, "patch": None}, b""
    return {"commit": head, "dirty": bool(patch), "patch": hashlib.sha256(patch).hexdigest() if patch else None}, patch


class Change(NamedTuple):
    """What a patch does to a file: whether the last commit lacks it, and the lines that are added."""

    name: str
    new: bool
    added: bytes


def changes(patch: bytes) -> Iterator[Change]:
    """The files that a patch of `code_state` changes and leaves there."""
    for section in f"\n{patch.decode(errors='surrogateescape')}".split("\ndiff --git ")[1:]:
        names, *lines = section.split("\n")
        name = names[len(names) // 2 + 1 :].strip('"').removeprefix("b/")  # a/NAME b/NAME, in quotes if it is odd
        added = "\n".join(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ "))
        if not lines[0].startswith("deleted file"):
            yield Change(name, lines[0].startswith("new file"), added.encode(errors="surrogateescape"))


def require_no_secret(patch: bytes) -> None:
    """Refuse a patch that would carry a secret into the record, and from there to MLflow.

    What it removes was committed, so that it is no secret any more.
    """
    for change in changes(patch):
        if kind := secret_in(Path(change.name).name, change.added):
            raise UserError(
                f"{change.name}: looks like {kind}, and a run copies what is not committed into {PATCH} and to MLflow. "
                f"Name the file in .gitignore, or move the secret out of the project"
            )


def summary(patch: bytes) -> str | None:
    """The line that names the new files in a patch, if there are any."""
    new = [change.name for change in changes(patch) if change.new]
    return f"{PATCH} keeps files that are not committed: {some(new)}" if new else None


def _patch(project: Project) -> bytes:
    """The difference of the work tree from the last commit, new files included; git's own index stays as it is."""
    plain = ("--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    prefixes = ("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false")
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder, "index")
        own = project.root / git_text(project.root, "rev-parse", "--git-path", "index")
        if own.is_file():
            shutil.copyfile(own, index)
        git(project.root, "add", "--intent-to-add", "--", ".", index=index)
        return git(project.root, *prefixes, "diff", *plain, "HEAD", "--", *READ, index=index)


def public_files(project: Project, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Those files, named as in the content address, that may leave this machine: git keeps them, and none is a secret.

    Outside git all count as kept, and so does a library that is installed.
    """
    paths = {name: project.shown(name) for name in names}
    left_out: set[str] = set()
    if is_repository(project.root):
        given = os.fsencode("\0".join(path for path in paths.values() if not path.startswith("/")))
        left_out = {
            *os.fsdecode(git(project.root, "check-ignore", "--stdin", "-z", given=given, ends=(0, 1))).split("\0")
        }
    for name, path in paths.items():
        content = project.file(name).read_bytes()
        if path not in left_out and not secret_in(Path(name).name, content):
            yield name, content
