"""Bake projects out of a committed copy of the template, as someone with a fresh clone would."""

import os
from pathlib import Path

import pytest
from bake import VENV, python_path
from baked import Bake, BakedProject, Environment, InstalledProject, cookiecutter, copy_template

# What takes longest begins first, and generation, which needs no environment, while another process makes that. With a
# class of one test a worker takes the next file along, too: so a short one stands after each.
FIRST = (
    *("test_image", "test_generation", "test_library.py::TestTraining", "test_surroundings", "test_benchmarks"),
    *("test_recipes", "test_library.py::TestRest", "test_kubernetes", "test_library.py::TestRepeated"),
    *("test_hygiene", "test_library.py::TestMeasuring", "test_measure", "test_library.py::TestSharded"),
    "test_project",
    "test_library.py::TestRecords",
    *("test_answers", "test_yours", "test_stale"),
    *("test_portable", "test_nodes", "test_slurm"),
)
DATES = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return this environment with fixed dates, an empty home and no settings of git, cookiecutter or this pytest."""
    foreign = ("GIT_", "COOKIECUTTER_", "PYTEST_")
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(foreign)}
    known = tmp_path_factory.mktemp("mypy")  # of the packages that all projects import
    return kept | DATES | {"HOME": str(tmp_path_factory.mktemp("home")), "MYPY_CACHE_DIR": str(known)}


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
