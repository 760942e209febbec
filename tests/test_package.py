"""The library as a package: what `pip install .` builds and installs, and a project that takes it from there."""

import hashlib
import json
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import released
from bake import ROOT
from baked import Bake, InstalledProject, copy_venv, run

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
PUBLIC = "import samebits as sb; print(sb.__version__, sb.__file__, sb.Run.__name__, sb.Step.__name__)"
LIST = "library.sha256"


PIP = "-m", "pip", "--quiet", "--disable-pip-version-check"


@pytest.fixture(scope="module")
def wheel(project: InstalledProject, template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist."""
    folder, env = tmp_path_factory.mktemp("wheel"), {**project.env, "PYTHONPATH": ""}
    clone = shutil.copytree(template, folder / "clone", symlinks=True)
    (sdist,) = run(project.python, "-c", BUILD, folder, cwd=clone, env=env, stderr=subprocess.PIPE).stdout.split()[-1:]
    words = *PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder
    run(project.python, *words, folder / sdist, cwd=folder, env=env)
    return next(folder.glob("samebits-*.whl"))


def test_wheel_of_the_sdist_holds_the_library_as_released(project: InstalledProject, wheel: Path, tmp_path: Path):
    """It installs into an empty folder, loads no torch on import, and has its command."""
    env = {**project.env, "PYTHONPATH": ""}
    own = tmp_path / "own"
    run(project.python, *PIP, "install", "--no-deps", "--target", own, wheel, cwd=tmp_path, env=env)
    listed = {line.split("  ")[1] for line in (ROOT / "samebits" / LIST).read_text().splitlines()}
    files = {path.relative_to(own / "samebits").as_posix() for path in (own / "samebits").rglob("*") if path.is_file()}
    assert {name for name in files if not name.endswith(".pyc")} == {*listed, LIST}
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", LIST], cwd=own / "samebits", check=True)
    alone = {**env, "PYTHONPATH": str(own)}
    printed = run(project.python, "-c", PUBLIC, cwd=tmp_path, env=alone).stdout.split()
    assert printed == ["0.2.0", str(own / "samebits" / "__init__.py"), "Run", "Step"]
    samebits = project.python, own / "bin" / "samebits"
    assert "Usage: samebits" in run(*samebits, "--help", cwd=tmp_path, env=alone).stdout
    assert run(*samebits, "--version", cwd=tmp_path, env=alone).stdout == "samebits 0.2.0\n"


def test_project_asks_for_the_ranges_of_the_library(project: InstalledProject):
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    theirs = tomllib.loads((project.path / "pyproject.toml").read_text())["project"]
    assert theirs["dependencies"] == ours["dependencies"] and theirs["requires-python"] == ours["requires-python"]
    extras = [line for lines in ours["optional-dependencies"].values() for line in lines]
    assert sorted(theirs["optional-dependencies"]["run"]) == sorted(extras)


# ---- a project without a copy of the library


@pytest.fixture(scope="module")
def environment(project: InstalledProject, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared environment's files in one of its own, with the library in it as a package."""
    folder = tmp_path_factory.mktemp("package")
    python, env = copy_venv(folder / "venv"), {**project.env, "PYTHONPATH": ""}
    run(python, *PIP, "install", "--no-deps", wheel, cwd=folder, env=env)
    return folder


@pytest.fixture(scope="module")
def packaged(environment: Path, wheel: Path, bake: Bake, project: InstalledProject) -> InstalledProject:
    """A project that was changed as the page on upgrades says; `make lock` would write this line into the locks."""
    path = bake().path
    shutil.rmtree(path / "vendor")
    changes = {
        "pyproject.toml": [("dependencies = [\n", 'dependencies = [\n    "samebits==0.2.0",\n'), (', "vendor"', "")],
        "dvc.yaml": [("      - vendor/samebits/core/ARITHMETIC\n", "")],
    }
    for name, pairs in changes.items():
        text = (path / name).read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        (path / name).write_text(text)
    for name in ("train-cpu.txt", "train-cuda.txt"):
        with (path / "requirements" / name).open("a") as lock:
            sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
            lock.write(f"samebits==0.2.0 \\\n    --hash=sha256:{sha256}\n    # via pyproject.toml\n")
    bin_, python = environment / "venv" / "bin", environment / "venv" / "bin" / "python"
    env = {**project.env, "PATH": f"{bin_}:{project.env['PATH']}", "PYTHONPATH": str(path / "src")}
    return replace(project, path=path, env=env, python=python)


def address(project: InstalledProject) -> dict[str, Any]:
    """What `samebits address` prints of a project."""
    printed = run(project.python, "-m", "samebits", "address", cwd=project.path, env=project.env, stderr=None)
    return dict(json.loads(printed.stdout))


@pytest.mark.long
def test_library_from_a_package_gives_the_same_address_and_stages(
    packaged: InstalledProject, project: InstalledProject
):
    """So earlier results stay valid. DVC runs each stage, and the files of core are hashed where they are installed."""
    packaged.run("dvc", "repro", "prepare")
    before = address(packaged)
    assert before == address(project)
    (library,) = packaged.python.parents[1].glob("lib/python3*/site-packages/samebits")
    paths = [library / name for name in ("core/exact.py", "core_releases.txt", LIST)]
    contents = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()  # it may be a hard link to the file of another environment
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    with paths[0].open("a") as core:
        core.write("# a comment\n")
    edited = address(packaged)
    released.list_library(library)
    reworded = address(packaged)
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert {name for name, part in before["preimage"].items() if part != edited["preimage"][name]} == {"core"}
    assert reworded["address"] == before["address"] and reworded["core_files"] != before["core_files"]
    params = packaged.path / "params.yaml"
    text = params.read_text()
    params.write_text(text.replace("epochs: 30", "epochs: 1", 1).replace("  enabled: true", "  enabled: false", 1))
    packaged.run("dvc", "repro")
    stated = json.loads(packaged.text("artifacts/receipt.json"))["predicate"]["library"]
    assert (stated["template"], stated["modified"]) == ("0.2.0", [])
    assert packaged.run(packaged.python, "requirements/check_locks.py").startswith("train-cpu")
    printed = run(packaged.python, "-m", "samebits", "upgrade", ROOT, cwd=packaged.path, env=packaged.env, check=False)
    assert printed.returncode == 2 and printed.stdout.startswith("vendor/samebits: missing; the library is installed")


@pytest.mark.long
def test_linters_pass_without_vendor(packaged: InstalledProject):
    """The order of imports stays that of the released files; types come with the package."""
    for words in (("ruff", "check", "--no-cache"), ("mypy", "--no-error-summary")):
        printed = packaged.run("flock", packaged.env["MYPY_CACHE_DIR"], packaged.python, "-m", *words)
        assert printed.strip() in ("", "All checks passed!")


@pytest.mark.long
def test_library_that_no_lock_names_is_refused(packaged: InstalledProject):
    """As any other package."""
    locks = {name: packaged.path / "requirements" / name for name in ("train-cpu.txt", "train-cuda.txt")}
    before = {path: path.read_text() for path in locks.values()}
    for path, text in before.items():
        path.write_text(text[: text.index("samebits==")])
    done = run(packaged.python, "-m", "samebits", "train", cwd=packaged.path, env=packaged.env, check=False)
    for path, text in before.items():
        path.write_text(text)
    assert done.returncode == 2 and "samebits (samebits 0.2.0): loaded, but requirements/" in done.stdout
