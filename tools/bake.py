"""Generate a project out of this work tree, and run it in the environment that all generated projects share here.

    python tools/bake.py

makes that environment, unless it is already what the locks say.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / "build" / "venv"  # one for the demo, the tests and the tools, so that it is made once
TOOLS = ROOT / "build" / "tools" / "bin"  # where cookiecutter is
STARTERS = ROOT / "{{cookiecutter.project}}" / "starters"
NAME, PACKAGE = "repro-project", "repro_project"  # of a project with the default answers


def command(template: Path | str, out: Path, answers: Mapping[str, str]) -> list[str]:
    """Return the command that generates a project into the folder `out`, without questions."""
    given = [f"{name}={value}" for name, value in answers.items()]
    return [str(TOOLS / "cookiecutter"), "--no-input", "--output-dir", str(out), str(template), *given]


def bake(out: Path, **answers: str) -> Path:
    """Generate a project into the folder `out`, in place of one that lies there; return the project's folder."""
    project = out.absolute() / answers.get("project", NAME)
    shutil.rmtree(project, ignore_errors=True)
    # `out` may lie inside this repository; the project is a repository of its own all the same
    environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(out.absolute())}
    subprocess.run(command(ROOT, out, answers), env=environ, check=True)
    return project


def python_path(project: Path) -> str:
    """Return the PYTHONPATH that leads to the project's package and to its copy of the library."""
    return f"{project / 'src'}:{project / 'vendor'}"


def in_venv(project: Path, environ: Mapping[str, str] = os.environ, venv: Path = VENV) -> dict[str, str]:
    """Return the environment of commands that use the shared environment, or that one, and this project's code."""
    return {**environ, "PATH": f"{venv}/bin:{environ['PATH']}", "PYTHONPATH": python_path(project)}


def venv_of(starter: str) -> Path:
    """Return the environment of a starter's projects: the shared one, unless the starter adds packages."""
    return ROOT / "build" / f"venv-{starter}" if (STARTERS / starter / "requirements").is_dir() else VENV


def make_venv(project: Path, venv: Path = VENV) -> None:
    """Make an environment from the project's locks, unless it is already what they say; by default the shared one."""
    make = ["make", "--no-print-directory", "environment", f"VENV={venv}"]
    subprocess.run(make, cwd=project, env=os.environ | {"LOCKS_ONLY": "1"}, check=True)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        make_venv(bake(Path(folder)))
