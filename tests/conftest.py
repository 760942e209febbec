"""The process of the tests, and projects out of a committed copy of the template, as from a fresh clone."""

import gc
import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from bake import VENV, python_path
from bake import bake as bake_in
from baked import STRICT, Answers, Bake, BakedProject, Environment, InstalledProject, cookiecutter, copy_template
from xdist.scheduler import LoadScopeScheduling

# What takes longest begins first.
FIRST = (
    *("test_image", "test_starters", "test_portable", "test_proof", "test_slurm", "test_nodes"),
    *("test_logged", "test_sync", "test_tracking", "test_project", "test_front", "test_verify", "test_setup"),
    *("test_measure", "test_generation", "test_bisected", "test_team", "test_training", "test_resume", "test_brought"),
    *("test_stored", "test_stale", "test_forgotten", "test_yours", "test_started", "test_sharded", "test_worlds"),
    "test_benchmarks",
)
# Files that share what is slow to make, which one worker does: a server of MLflow, a run that has proved itself.
TOGETHER = {
    "server": ("test_logged", "test_sync", "test_tracking"),
    "proof": ("test_proof", "test_proof_early", "test_proof_guards", "test_proof_parts"),
}
# The project that the library's tests run on. Written here, for their modules look for it when they are imported.
OWN = Path(gettempdir(), f"samebits-tests-{os.getpid()}")
if "REPRO_PROJECT" not in os.environ:
    os.environ["REPRO_PROJECT"] = str(bake_in(OWN, package="project"))
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # else threads that wait for each other take a busy core from the others
gc.disable()  # until all tests are collected: each look would pass all modules that were loaded
DATES = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}


def pytest_configure(config: pytest.Config) -> None:
    """Give this process and the workers the strict environment, by starting it again where something is missing.

    It must happen before torch is imported, and while standard output is the real one: pytest captures it when it
    imports this file, and again from the first test on, but not now.
    """
    if not hasattr(config, "workerinput"):
        sys.path.insert(0, f"{os.environ['REPRO_PROJECT']}/vendor")
        from samebits.config.settings import Determinism
        from samebits.core.errors import UserError
        from samebits.core.flags import applicable, set_environment, stated_variables

        strict = Determinism(cpu="portable", relax=())
        try:
            if STRICT not in os.environ:
                for flag in applicable(strict):  # a variable that is set on this machine would stay set in each test
                    os.environ.pop(flag.name, None)
                os.environ[STRICT] = json.dumps(stated_variables(strict))
            set_environment(strict)
        except UserError as refused:
            pytest.exit(f"the tests want the strict environment:\n{refused}", returncode=2)
    os.environ.pop("PYTHONPATH", None)  # it leads to xdist
    os.environ["SAMEBITS_PROVE"] = "never"  # but for the tests of it: it takes longer than their trainings


def pytest_collection_finish() -> None:
    """Take the strict variables away again: modules that read them when they are loaded are, and who tests a start
    begins without. The library's tests get them back.
    """
    for name in json.loads(os.environ[STRICT]):
        os.environ.pop(name, None)
    gc.freeze()  # else each look for garbage would pass all modules that were collected: tests that parse take a minute
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the project."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(OWN, ignore_errors=True)


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return this environment with fixed dates, an empty home and no settings of git, cookiecutter or this pytest."""
    foreign = ("GIT_", "COOKIECUTTER_", "PYTEST_", "REPRO_")
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(foreign)}
    base = tmp_path_factory.getbasetemp()
    # what mypy knows of the packages that all projects import: workers share it, for it takes a minute
    known = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "mypy"
    known.mkdir(exist_ok=True)
    return kept | DATES | {"HOME": str(tmp_path_factory.mktemp("home")), "MYPY_CACHE_DIR": str(known)}


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, env: Environment) -> Path:
    """Return a git repository with the template in it."""
    return copy_template(tmp_path_factory.mktemp("template") / "repro-template", env)


@pytest.fixture(scope="session")
def bake(tmp_path_factory: pytest.TempPathFactory, template: Path, env: Environment) -> Bake:
    """Return a function that generates a project from answers. That of a starter alone is a copy."""

    def generated(source: Path | str, answers: Answers) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp("out")
        done = cookiecutter(source, out, answers, env=env)
        assert done.returncode == 0, done.stdout
        return out, done.stdout

    @cache
    def first(starter: str) -> tuple[Path, str]:
        return generated(template, {"starter": starter})

    def bake(source: Path | str | None = None, /, **answers: str) -> BakedProject:
        if source or answers.keys() - {"starter"}:
            out, log = generated(source or template, answers)
        else:
            kept, log = first(answers.get("starter", "digits"))
            out = Path(shutil.copytree(kept, tmp_path_factory.mktemp("out"), symlinks=True, dirs_exist_ok=True))
        return BakedProject(out / answers.get("project", "repro-project"), log, env)

    return bake


@pytest.fixture(scope="session")
def project(bake: Bake) -> InstalledProject:
    """Return a project with the default answers, installed and with its data prepared."""
    baked = bake()
    python = VENV / "bin" / "python"
    env = {**baked.env, "PYTHONPATH": python_path(baked.path)}  # not another project that was installed since
    project = InstalledProject(baked.path, baked.log, env, python, "repro_project")
    project.make("setup")
    project.run(python, "-m", "samebits", "prepare")
    return project


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Hand out classes and files, and files that belong together, as one."""

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.partition("::")[0]).stem
            return next((name for name, stems in TOGETHER.items() if stem in stems), super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, where files are run side by side."""

    def place(item: pytest.Item) -> int:
        file, _, name = item.nodeid.partition("::")
        name = f"{Path(file).name}::{name}"
        return next((number for number, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
