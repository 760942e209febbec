"""The state of the project's code in git: its commit, and a patch of all uncommitted changes."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..project import Project

# The files that a run reads and git keeps. No other file of the work tree reaches a record.
READ = ("src", "requirements", "params.yaml", "pyproject.toml", "dvc.yaml", ":(glob)**/*.dvc")


def code_state(project: Project) -> tuple[dict[str, Any], bytes]:
    """The project's git commit, and a patch of the uncommitted changes in files that a run reads.

    The facts are {"commit", "dirty", "patch": SHA-256}; all None outside git.
    """
    try:
        head = _git(project, "rev-parse", "HEAD").decode().strip()
        patch = _patch(project)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None, "patch": None}, b""
    return {"commit": head, "dirty": bool(patch), "patch": hashlib.sha256(patch).hexdigest() if patch else None}, patch


def _patch(project: Project) -> bytes:
    """The difference of the work tree from the last commit, new files included; git's own index stays as it is."""
    plain = ("--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    prefixes = ("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false")
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder, "index")
        own = project.root / _git(project, "rev-parse", "--git-path", "index").decode().strip()
        if own.is_file():
            shutil.copyfile(own, index)
        _git(project, "add", "--intent-to-add", "--", ".", index=index)
        return _git(project, *prefixes, "diff", *plain, "HEAD", "--", *READ, index=index)


def _git(project: Project, *arguments: str, index: Path | None = None) -> bytes:
    env = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    return subprocess.run(["git", *arguments], cwd=project.root, env=env, check=True, capture_output=True).stdout
