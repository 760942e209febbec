"""Modules from elsewhere, and from packages that no lock has, are refused by name; all others pass."""

import os
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from small import Case, small
from warm import PROJECT

from samebits.address import locks


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return small(tmp_path / "tides", monkeypatch)


PATHS = {"stdlib": "python/lib", "platstdlib": "python/lib", "scripts": "venv/bin"}


def site_packages(case: Case) -> Path:
    """The folder of installed packages, as a small project's environment has it."""
    above = case.project.root.parent
    case.monkeypatch.setattr(locks.sysconfig, "get_path", lambda name: str(above / PATHS.get(name, "venv/lib")))
    return above / "venv/lib"


def test_modules_of_others_are_none_of_the_projects_business(case: Case):
    for name in ("tests/conftest.py", "requirements/check_locks.py", ".venv/lib/library.py"):
        case.write(name, "")
    case.monkeypatch.setattr(sys, "prefix", str(case.project.root / ".venv"))
    for name in (
        site_packages(case) / "library" / "__init__.py",
        "tests/conftest.py",
        "requirements/check_locks.py",
        ".venv/lib/library.py",
        "_no_such_file.py",
    ):
        case.load(name)
    case.run("train")


@pytest.mark.parametrize("place", ["elsewhere/one.py", "elsewhere.zip/one.py", "python/lib/site-packages/one.py"])
@pytest.mark.parametrize("stage", ["train", "prepare", ""])
def test_module_from_outside_is_refused_unless_it_is_allowed_by_name(case: Case, place: str, stage: str):
    """By PYTHONPATH, from an archive, or from the packages of another Python."""
    file = case.project.root.parent / place
    site_packages(case)
    case.load(file)
    name = f"of {file}"
    for during in (lambda: None, lambda: case.load(file)):
        said = case.refusal(stage, during)
        assert said.startswith(f"{name} ({file}): loaded from outside the project and its environment, so no hash cov")
        assert said.endswith("name it in unhashed.modules")
        case.monkeypatch.delitem(sys.modules, name)
    case.load(file)
    for allowed in (name.partition(".")[0], "all"):
        case.run(stage, unhashed=(*case.before, allowed))


def test_module_that_an_installed_package_makes_is_its_own(case: Case):
    """As torch does, in a folder for temporary files."""
    made = ModuleType(f"{torch.__name__}.made.xyz")
    made.__file__ = "/tmp/torchinductor_ada/xy/xyz.py"
    case.monkeypatch.setitem(sys.modules, made.__name__, made)
    case.before = tuple(set(case.before) - {"torch"})
    case.write("requirements/train-cpu.txt", f"torch=={version('torch')}")
    case.run("train")


def test_folder_is_resolved_as_by_the_system(tmp_path: Path):
    """Links, double slashes, dots, and what cannot be looked at, above it included."""
    (tmp_path / "real" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    for text in ("real/inside", "link/inside", "link/gone/x", "link/../real", "real//inside/./", "x" * 300 + "/y", ""):
        for folder in (f"{tmp_path}/{text}", text):
            assert locks.resolved(folder) == os.path.realpath(folder)
    assert all(locks.is_below(*each) for each in (("/a/b", "/a"), ("/a", "/a"), ("/a", "/"), ("/", "/")))
    assert not locks.is_below("/ab", "/a")


# ---- packages that no lock has

MODULE = "rates/__init__.py"
PINNED = "numpy==2.4.6\nthe.rates_of-tides==1.2.post1 \\\n    --hash=sha256:00\n"
PACKAGES = {  # the name of the .dist-info folder that brought the module: what the refusal calls it
    "the_rates_of_tides-1.3": "the_rates_of_tides 1.3",
    "the_rates_of_tides-1.2.post1+cpu": "the_rates_of_tides 1.2.post1+cpu",
    "rates-1.2.post1": "rates 1.2.post1",
}


def install(case: Case, package: str, file: str = MODULE) -> Path:
    """A file in the environment that a package brought; of no package where its name is empty."""
    folder = site_packages(case)
    case.write("requirements/train-cpu.txt", PINNED)
    for name, text in {file: "", f"{package or 'other-1'}.dist-info/RECORD": f"{file if package else ''},,\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / file


def load(case: Case, name: str, file: Path) -> None:
    module = ModuleType(name)
    module.__file__ = str(file)
    case.monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("stage", ["train", "prepare", ""])
@pytest.mark.parametrize("package", [*PACKAGES, ""])
def test_package_that_no_lock_has_is_refused_unless_it_is_allowed_by_name(case: Case, package: str, stage: str):
    file = install(case, package)
    load(case, "rates.of_one_day", file)
    load(case, "rates", file)
    said = case.refusal(stage)
    assert said.startswith(f"rates ({PACKAGES.get(package, file)}): loaded, but requirements/*.txt do not have it")
    assert said.endswith("with make setup, add it to pyproject.toml and run make lock, or name it in unhashed.modules")
    for allowed in ("rates", "all"):
        case.run(stage, unhashed=(*case.before, allowed))


@pytest.mark.parametrize("package", ["the_rates_of_tides-1.2.post1", "The.Rates_of-tides-1.2.post1"])
def test_package_that_a_lock_has_passes(case: Case, package: str):
    load(case, "rates", install(case, package))
    case.run("train")


@pytest.mark.parametrize("name", ["_virtualenv", "__editable___tides_finder"])
def test_module_that_leads_python_to_an_environment_or_a_project_passes(case: Case, name: str):
    load(case, name, install(case, "", f"{name}.py"))
    case.run("train")


def test_every_package_of_this_environment_is_the_locks():
    """The names and versions of real .dist-info folders and real locks meet."""
    folder = Path(sysconfig.get_path("purelib"))
    locked = locks.locked_files(PROJECT, folder)
    packages = {path.stem: set(locks.files_of(path)) for path in folder.glob("*.dist-info")}
    projects = {path.parent.stem for path in folder.glob("*/direct_url.json") if '"editable": true' in path.read_text()}
    assert len(packages) > 50 and {name for name, files in packages.items() if not files <= locked} == projects
