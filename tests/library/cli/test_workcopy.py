"""A work copy has a commit of the user's repository, and leaves that repository as it was."""

import shutil
import subprocess
from pathlib import Path

import pytest
from clone import commit, copied, git, project_in
from project.config import Config
from support import PACKAGE, PROJECT

from samebits.analysis.workcopy import WorkCopy, work_copy
from samebits.config.params import load
from samebits.core.errors import UserError
from samebits.start import trainings


def said(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project in a folder of a repository: two commits, a hook, and uncommitted work."""
    top = tmp_path / "top"
    root = top / "below"
    (root / "src" / PACKAGE).mkdir(parents=True)
    for text in ("first", "second"):
        (root / "a.txt").write_text(text)
        commit(top, text)
    hook = top / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    (root / "a.txt").write_text("uncommitted")
    return root


@pytest.mark.parametrize("hook", [False, True])
def test_commits_are_checked_out_and_the_repository_is_left_alone(
    hook: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also in a hook of git, which names the repository and its index in variables."""
    views = ("status", "--porcelain"), ("worktree", "list"), ("branch", "--all")
    before = [said(root, *words) for words in views]
    if hook:
        monkeypatch.setenv("GIT_DIR", str(root.parent / ".git"))
        monkeypatch.setenv("GIT_INDEX_FILE", str(root.parent / ".git" / "index"))
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "left").write_text("by one that was killed")
    with work_copy(project_in(root), folder, "") as copy:
        assert (copy.root / "a.txt").read_text() == "second" and not (folder / "left").exists()
        (copy.root / "strange").touch()
        copy.check_out("HEAD~1")
        assert [(path.name, path.read_text()) for path in copy.root.iterdir()] == [("a.txt", "first")]
        assert copy.holds("cat-file", "-e", "HEAD:below/a.txt") and not copy.holds("cat-file", "-e", "HEAD:nowhere")
    monkeypatch.undo()
    assert not folder.exists() and not (tmp_path / "hooked").exists() and (root / "a.txt").read_text() == "uncommitted"
    assert [said(root, *words) for words in views] == before
    git(root, "checkout", "--quiet", "--force", "HEAD~1")  # the control: the hook runs
    assert (tmp_path / "hooked").exists()


def test_copy_without_its_repository_is_not_taken_for_the_users(root: Path):
    """Its `.git` is lost: git would find the one of the folders above."""
    with work_copy(project_in(root), root / "build" / "copy", "") as copy:
        (copy.top / ".git").unlink()
        assert not copy.holds("checkout", "--force", "--detach", "HEAD~1")
    assert (root / "a.txt").read_text() == "uncommitted"


def test_what_is_not_to_be_had_is_refused(root: Path, tmp_path: Path):
    def entered(root: Path, commit: str = "HEAD") -> WorkCopy:
        with work_copy(project_in(root), tmp_path / "copy", "so there is no code", commit) as copy:
            return copy

    with pytest.raises(UserError, match=r"commit 0{40}: not in this repository; get it with: git fetch"):
        entered(root, "0" * 40)
    with pytest.raises(UserError, match="no git repository, so there is no code"):
        entered(Path(shutil.copytree(root, tmp_path / "alone")))


# ---- the config of another release


def test_config_is_read_by_the_commits_own_code(tmp_path: Path):
    copied(tmp_path, ["src", "vendor"], ["params.yaml", "pyproject.toml"])
    config = load(Config, PROJECT / "params.yaml", ["seed=7"])
    read = trainings.config_of(project_in(tmp_path), ["seed=7"])
    assert read["config"] == config.flat() and read["config"]["seed"] == 7
    assert read["addressed"] == config.addressed() and read["environment"] == config.environmental()
    with pytest.raises(trainings.Ended, match="unknown key"):
        trainings.config_of(project_in(tmp_path), ["sede=7"])
