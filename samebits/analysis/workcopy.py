"""A work copy: commits of the user's repository in a folder of their own, which is gone afterwards.

It is a work tree of that repository (git-worktree(1)): the user's own one, its index and its branch stay as they are.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base.git import GitFailed, git_text, is_repository
from ..base.project import NAME, VENDORED, Project
from ..core.errors import UserError

# Of each command there: no hook of anybody runs.
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "advice.detachedHead=false")


class WorkCopy:
    """A work tree in which commits are checked out one after another.

    Attributes:
        top: its folder.
        root: the folder of the project in it, which lies below where the repository holds more than the project.
    """

    def __init__(self, top: Path, prefix: str) -> None:
        self.top, self.root, self.prefix = top, top / prefix, prefix

    def git(self, *words: str, ends: Sequence[int] = (0,)) -> str:
        """Run git there and return what it prints.

        Raises:
            GitFailed: it cannot do it.
        """
        # both named: without its own .git, git would look for one in the folders above, which is the user's
        places = f"--git-dir={self.top / '.git'}", f"--work-tree={self.top}"
        return git_text(self.top, *QUIET, *places, *words, ends=ends, own=True)

    def holds(self, *words: str) -> bool:
        """Whether git does a command without a failure."""
        try:
            self.git(*words)
        except GitFailed:
            return False
        return True

    def check_out(self, commit: str) -> None:
        """Have a commit there, and nothing else."""
        self.git("checkout", "--quiet", "--force", "--detach", commit)
        self.clean()

    def clean(self) -> None:
        """Remove what is in no commit; bytecode too: a file of the same size and second would be taken for it."""
        self.git("clean", "--quiet", "-ffdx")


@contextmanager
def work_copy(project: Project, folder: Path, whose: str, commit: str = "HEAD") -> Iterator[WorkCopy]:
    """Check a commit out in `folder`, which lies on the same machine and is removed afterwards.

    `whose` says in a refusal what is wanted of the repository.

    Raises:
        UserError: the project is in no repository, or that has no such commit.
    """
    if not is_repository(project.root, own=True):
        raise UserError(f"{project.root}: no git repository, {whose}")
    try:
        _git(project, "cat-file", "-e", f"{commit}^{{commit}}")
    except GitFailed:
        raise UserError(
            f"commit {commit}: not in this repository; get it with: git fetch, and run this again"
        ) from None
    try:
        _remove(project, folder)  # left by one that was killed
        _git(project, "worktree", "add", "--quiet", "--detach", str(folder), commit)
        yield WorkCopy(folder, _git(project, "rev-parse", "--show-prefix"))
    finally:
        _remove(project, folder)


def require_command(root: Path, commit: str) -> None:
    """Refuse a commit of a project in `root` whose library is of an older layout, in which the package was the command.

    Raises:
        UserError: it is.
    """
    if (root / VENDORED).is_dir() and not (root / VENDORED / "__main__.py").is_file():
        raise UserError(
            f"commit {commit[:12]}: its library has no command {NAME}, which came with a later release, so nothing of "
            f"it starts from here. Its own command does it: git worktree add ../before {commit[:12]}, and there: "
            f"python -m PACKAGE replay RUN"
        )


def _remove(project: Project, folder: Path) -> None:
    with suppress(GitFailed):  # where there is none
        _git(project, "worktree", "remove", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    _git(project, "worktree", "prune")


def _git(project: Project, *words: str) -> str:
    return git_text(project.root, *QUIET, *words, own=True)
