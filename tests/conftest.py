"""Bake projects out of a committed copy of the template, as someone with a fresh clone would."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import disguise
import pytest

# What it tests is not used where CPUID cannot be faulted.
collect_ignore = [] if disguise.faulting() else ["test_spoof.py"]
ROOT = Path(__file__).parents[1]
PROJECT = "{{cookiecutter.project}}"
TOOLS = Path(sys.executable).parent
VENV = ROOT / "build" / "venv"  # a generated project's environment, shared with `make demo`
DATES = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}

Answers = Mapping[str, str]
Environment = Mapping[str, str]


def run(*command: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; what it prints, errors included, is in `stdout`."""
    pipe, merge = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, stdout=pipe, stderr=merge, text=True, encoding="utf-8", check=False, **options)
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done


def cookiecutter(
    template: Path | str, out: Path, answers: Answers, *, before: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Generate as a user does, without questions; `before` is a command that runs this one."""
    given = [f"{name}={value}" for name, value in answers.items()]
    command = [TOOLS / "cookiecutter", "--no-input", "--output-dir", out, template, *given]
    return run(*before, *command, check=False, **options)


@dataclass(frozen=True)
class BakedProject:
    """A generated project, and what was printed while it was generated."""

    path: Path
    log: str
    env: Environment

    def run(self, *command: str | Path) -> str:
        """Run a command in the project and return what it prints."""
        return run(*command, cwd=self.path, env=self.env).stdout

    def has_file(self, name: str) -> bool:
        """Say whether the project has this file."""
        return (self.path / name).is_file()

    def text(self, name: str) -> str:
        """Return the text of a file."""
        return (self.path / name).read_text(encoding="utf-8")

    def files(self) -> dict[str, tuple[bool, bytes]]:
        """Return whether it is executable, and its bytes, for each file outside .git."""
        found = {path.relative_to(self.path): path for path in self.path.rglob("*") if path.is_file()}
        return {
            str(name): (os.access(path, os.X_OK), path.read_bytes())
            for name, path in sorted(found.items())
            if name.parts[0] != ".git"
        }

    def texts(self) -> dict[str, str]:
        """Return the text of each file that is text."""
        return {name: data.decode() for name, (_, data) in self.files().items() if b"\0" not in data}

    def commit(self) -> str:
        """Return the id of the newest commit."""
        return self.run("git", "rev-parse", "HEAD").strip()


class Bake(Protocol):
    """The type of the `bake` fixture."""

    def __call__(self, source: Path | str | None = None, /, **answers: str) -> BakedProject: ...


def tracked() -> list[str]:
    """Return the names of the files that the template's next commit holds."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    return [name for name in listed.split("\0") if (ROOT / name).is_file()]


def weights(out: Path) -> str:
    """Return the SHA-256 of a finished run's weights."""
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def commit_all(repository: Path, env: Environment) -> None:
    """Commit everything in a repository, ignored files too."""
    git = ("git", "-C", repository, "-c", "user.name=tester", "-c", "user.email=tester@example.invalid")
    run(*git, "add", "--all", "--force", env=env)
    run(*git, "commit", "--message", "change", env=env)


def copy_template(target: Path, env: Environment) -> Path:
    """Copy the template's tracked files into a git repository of one commit."""
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    run("git", "init", "--initial-branch=main", target, env=env)
    commit_all(target, env)
    return target


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return this environment with fixed dates, an empty home and no settings of git or cookiecutter."""
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("GIT_", "COOKIECUTTER_"))}
    return kept | DATES | {"HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, env: Environment) -> Path:
    """Return a git repository with the template in it."""
    return copy_template(tmp_path_factory.mktemp("template") / "repro-template", env)


@pytest.fixture(scope="session")
def bake(tmp_path_factory: pytest.TempPathFactory, template: Path, env: Environment) -> Bake:
    """Return a function that generates a project from answers."""

    def bake(source: Path | str | None = None, /, **answers: str) -> BakedProject:
        out = tmp_path_factory.mktemp("out")
        done = cookiecutter(source or template, out, answers, env=env)
        assert done.returncode == 0, done.stdout
        return BakedProject(out / answers.get("project", "repro-project"), done.stdout, env)

    return bake


@dataclass(frozen=True)
class InstalledProject(BakedProject):
    """A generated project with its environment, and the names of both."""

    python: Path
    package: str

    def make(self, *arguments: str) -> str:
        """Run make with the shared environment and return what it printed."""
        return self.run("make", "--no-print-directory", *arguments, f"VENV={VENV}")


@pytest.fixture(scope="session")
def project(bake: Bake) -> InstalledProject:
    """Return a project with the default answers, installed and with its data prepared."""
    baked = bake()
    python = VENV / "bin" / "python"
    env = {**baked.env, "PYTHONPATH": str(baked.path / "src")}  # not another project that was installed since
    project = InstalledProject(baked.path, baked.log, env, python, "repro_project")
    project.make("setup")
    project.run(python, "-m", "repro_project.prepare")
    return project


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, where files are run side by side."""
    longest = ["test_image.py", "test_own.py", "test_portable.py", "test_nodes.py", "test_slurm.py"]
    items.sort(key=lambda item: longest.index(item.path.name) if item.path.name in longest else len(longest))


def pytest_report_header() -> str:
    """Say how other CPUs are played here."""
    return f"other CPUs: {'by CPUID faulting' if disguise.faulting() else 'by QEMU, for this one cannot fault CPUID'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
