"""Generated projects as the tests handle them, and a committed copy of the template to generate them from."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from bake import ROOT, TOOLS, VENV, command

PROJECT = "{{cookiecutter.project}}"
LINK = Path(PROJECT, "vendor", "samebits")  # to the library, whose files lie at the root

UV_INSTALL = "install", "--quiet", "--no-deps", "--require-hashes", "--index-strategy", "unsafe-best-match"
STRICT = "REPRO_TESTS_STRICT"  # holds the variables of the strict environment, which the library's tests get, as JSON

Answers = Mapping[str, str]
Environment = Mapping[str, str]


def run(*command: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; what it prints, errors included unless `stderr` says where they go, is in `stdout`."""
    options = {"stderr": subprocess.STDOUT} | options
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False, **options)
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done


# Runs cookiecutter in forks of a process that has loaded it: that is a third of what a generation takes.
FORKING = """
import json, os, sys
import cookiecutter.extensions
from cookiecutter.cli import main
for line in sys.stdin:
    words, folder, file = json.loads(line)
    if not (child := os.fork()):
        for descriptor, name in enumerate((os.devnull, file, file)):
            os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), descriptor)
        os.chdir(folder)
        main(words)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _loaded(*variables: tuple[str, str]) -> subprocess.Popen[str]:
    """A process that has loaded cookiecutter, with these variables; it ends with this one."""
    pipe = subprocess.PIPE
    return subprocess.Popen([TOOLS / "python", "-c", FORKING], env=dict(variables), stdin=pipe, stdout=pipe, text=True)


def cookiecutter(
    template: Path | str, out: Path, answers: Answers, *, env: Environment, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Generate as a user does, without questions."""
    process = _loaded(*sorted(env.items()))
    assert process.stdin and process.stdout
    _, *words = command(template, out, answers)
    with NamedTemporaryFile() as file:
        print(json.dumps((words, str(cwd or Path.cwd()), file.name)), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(words, code, file.read().decode())


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


def copy_venv(target: Path, *locks: Path) -> Path:
    """Make an environment of the shared one's files, which takes no time, and of what these locks have beyond it.

    Returns its python.
    """

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another disk
            shutil.copy2(source, target)

    lock = os.open(VENV.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # `make setup` holds it while it installs a project there
    shutil.copytree(VENV, target, symlinks=True, copy_function=link)
    os.close(lock)
    for script in (target / "bin").iterdir():
        if not script.is_symlink() and (content := script.read_bytes()).startswith(b"#!"):
            script.unlink()
            script.write_bytes(content.replace(bytes(VENV), bytes(target)))
            script.chmod(0o755)
    python = target / "bin" / "python"
    if locks:
        words = [word for lock in locks for word in ("-r", lock)]
        env = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
        run(python, ROOT / PROJECT / "requirements" / "with_uv.py", *UV_INSTALL, *words, env=env)
    return python


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
    (target / LINK).parent.mkdir()
    (target / LINK).symlink_to((ROOT / LINK).readlink())
    run("git", "init", "--initial-branch=main", target, env=env)
    commit_all(target, env)
    return target


@dataclass(frozen=True)
class InstalledProject(BakedProject):
    """A generated project with its environment, and the names of both."""

    python: Path
    package: str

    def make(self, *arguments: str) -> str:
        """Run make with the project's environment, as it is, and return what it printed."""
        return self.run(*self._make(*arguments))

    def lint(self) -> None:
        """Run ruff, mypy and import-linter with the project's own settings; one by one, for all share mypy's cache."""
        self.run("flock", self.env["MYPY_CACHE_DIR"], *self._make("lint"))

    def _make(self, *arguments: str) -> tuple[str, ...]:
        venv = f"VENV={self.python.parents[1]}"
        return "make", "--no-print-directory", "--assume-old=environment", *arguments, venv


# The doctor, without its other checks: to read all files of all packages takes longest.
LEFTOVERS = """
import runpy
from samebits.analysis.doctor import doctor
doctor.CHECKS = [check for check in doctor.CHECKS if check.area == "leftovers"]
runpy.run_module("samebits", run_name="__main__")
"""


def left_of_the_starter(project: BakedProject) -> list[dict[str, str]]:
    """What `samebits doctor` says of each place where something of the starter may be left."""
    done = run("python", "-c", LEFTOVERS, "doctor", "--json", cwd=project.path, env=project.env, check=False)
    return list(json.loads(done.stdout))
