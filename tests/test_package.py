"""The library as a package: what `pip install .` builds and installs, and what an installed one can do."""

import shutil
import subprocess
import tomllib
from pathlib import Path

from bake import ROOT
from baked import InstalledProject, run

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
PUBLIC = "import samebits as sb; print(sb.__version__, sb.__file__, sb.Run.__name__, sb.Step.__name__)"
LIST = "library.sha256"


def test_wheel_of_the_sdist_holds_the_library_as_released(project: InstalledProject, template: Path, tmp_path: Path):
    """It installs into an empty folder, loads no torch on import, and has its command."""
    env = {**project.env, "PYTHONPATH": ""}
    clone = shutil.copytree(template, tmp_path / "clone", symlinks=True)
    (sdist,) = run(project.python, "-c", BUILD, tmp_path, cwd=clone, env=env, stderr=subprocess.PIPE).stdout.split()[
        -1:
    ]
    words = "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"
    own = tmp_path / "own"
    run(project.python, *words, "--no-build-isolation", "--target", own, tmp_path / sdist, cwd=tmp_path, env=env)
    listed = {line.split("  ")[1] for line in (ROOT / "samebits" / LIST).read_text().splitlines()}
    files = {path.relative_to(own / "samebits").as_posix() for path in (own / "samebits").rglob("*") if path.is_file()}
    assert {name for name in files if not name.endswith(".pyc")} == {*listed, LIST}
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", LIST], cwd=own / "samebits", check=True)
    alone = {**env, "PYTHONPATH": str(own)}
    printed = run(project.python, "-c", PUBLIC, cwd=tmp_path, env=alone).stdout.split()
    assert printed == ["0.1.0", str(own / "samebits" / "__init__.py"), "Run", "Step"]
    assert "Usage: samebits" in run(project.python, own / "bin" / "samebits", "--help", cwd=tmp_path, env=alone).stdout


def test_project_asks_for_the_ranges_of_the_library(project: InstalledProject):
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    theirs = tomllib.loads((project.path / "pyproject.toml").read_text())["project"]
    assert theirs["dependencies"] == ours["dependencies"] and theirs["requires-python"] == ours["requires-python"]
    extras = [line for lines in ours["optional-dependencies"].values() for line in lines]
    assert sorted(theirs["optional-dependencies"]["run"]) == sorted(extras)
