"""A clone of this project with uncommitted code, in which runs are made and made again."""

import os
import shutil
import subprocess
from pathlib import Path

from conftest import PACKAGE, PROJECT, python, training
from project.repro.base.project import Project

SETTINGS = "tracking.enabled=false", "train.learning_rate=0.003", "seed=5"


def project_in(folder: Path) -> Project:
    """The project that lies in a folder."""
    return Project(folder / "src" / PACKAGE)


def git(project: Path, *arguments: str) -> None:
    """Run git under a name of its own and without the user's settings."""
    identity = "-c", "user.name=tester", "-c", "user.email=tester@example.invalid"
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *identity, *arguments]
    subprocess.run(command, cwd=project, env=os.environ | alone, check=True, capture_output=True)


def command(project: Path, module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a module of that project's package."""
    return python("-m", module, *arguments, cwd=project, env={"PYTHONPATH": str(project / "src")})


def train(project: Path, out: str) -> Path:
    """Train there for one epoch and return the run directory."""
    arguments = training(project / out, project / "data" / "prepared", *SETTINGS)
    done = command(project, f"{PACKAGE}.train", *arguments)
    assert done.returncode == 0, done.stderr
    return project / out


def clone(folder: Path) -> Path:
    """Clone this project's files into a folder, edit some, and train into artifacts/ there."""
    for part in ("src", "requirements", ".dvc", "data/raw"):
        shutil.copytree(PROJECT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "cache", "tmp"))
    for name in ("params.yaml", "results.lock", "dvc.yaml", "dvc.lock", "pyproject.toml", ".gitignore", "README.md"):
        shutil.copyfile(PROJECT / name, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "start")
    source = folder / "src" / PACKAGE
    (source / "added.py").write_text("WIDER = 1.25\n")
    with (source / "model.py").open("a") as model:
        model.write("\n\nfrom .added import WIDER  # noqa\n")
    (folder / "README.md").write_text("nothing that a run reads\n")
    assert command(folder, f"{PACKAGE}.prepare").returncode == 0
    train(folder, "artifacts")
    return folder
