"""The code that runs is that of the sources as they were hashed, whatever bytecode lies beside them."""

import json
import os
import py_compile
import shutil
from functools import partial
from pathlib import Path

import pytest
from support import OURS, python

from samebits.address import loaded
from samebits.address.address import code
from samebits.base.project import Project
from samebits.core.errors import UserError
from samebits.core.sampling import _begin_worker

OLD, NEW = "RATE = 0.1\n", "RATE = 0.2\n"  # of one length
MODULES = "sealed.__init__", "sealed.early", "samebits.__init__", "samebits.loader", "sealed.rates"


@pytest.fixture
def other(tmp_path: Path) -> Project:
    """A project with this library, whose modules all hold a constant."""
    package = tmp_path / "src" / "sealed"
    ignored = shutil.ignore_patterns("__pycache__", "analysis")
    shutil.copytree(OURS.library, tmp_path / "vendor" / "samebits", ignore=ignored)
    package.mkdir(parents=True)
    for name, text in {"__init__": "from . import early\n", "early": "", "rates": "def rate(): return RATE\n"}.items():
        (package / f"{name}.py").write_text(text)
    for name in MODULES:
        with file_of(Project(package), name).open("a") as file:
            file.write(f"{NEW}print(__name__)\n")
    return Project(package)


def file_of(project: Project, module: str) -> Path:
    return project.file(f"{module.replace('.', '/').removeprefix('sealed/')}.py")


BEGIN = """
from pathlib import Path
from samebits import loader
from samebits.base.project import Project
project = Project(Path("src/sealed").resolve())
loader.cover(project.name)
"""


def run(other: Project, script: str, **env: str) -> list[str]:
    """What a process prints that imports the project."""
    without = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPATH": os.pathsep.join(other.path)}
    done = python("-c", BEGIN + script, cwd=other.root, env=without | env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ---- bytecode

LOADING = """
import importlib
from samebits.address import loaded
loaded.remember(project)
import sealed.rates
loaded.require_unchanged(project)
print(*(importlib.import_module(name.removesuffix(".__init__")).RATE for name in MODULES))
""".replace("MODULES", str(MODULES))
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
TIMESTAMP = py_compile.PycInvalidationMode.TIMESTAMP


@pytest.mark.long
@pytest.mark.parametrize("mode", [UNCHECKED, TIMESTAMP])
def test_bytecode_of_an_older_version_is_not_run(other: Project, mode: py_compile.PycInvalidationMode):
    for name in MODULES:
        file = file_of(other, name)
        now = file.read_text()
        file.write_text(now.replace(NEW, OLD))
        kept = file.stat().st_mtime_ns
        py_compile.compile(str(file), invalidation_mode=mode, doraise=True)
        file.write_text(now)
        os.utime(file, ns=(kept, kept))
    assert run(other, LOADING)[-1] == "0.2 0.2 0.2 0.2 0.2"


@pytest.mark.parametrize("written", ["", "1"])
def test_source_edited_beside_its_bytecode_runs_and_is_not_refused(other: Project, written: str):
    """As in a container, where no bytecode is written."""
    run(other, LOADING)
    assert not (other.package / "__pycache__").exists()
    for name in ("sealed.__init__", "sealed.rates"):
        file = file_of(other, name)
        file.write_text(file.read_text().replace(NEW, "RATE = 0.25\n"))
    py_compile.compile(str(file), invalidation_mode=TIMESTAMP, doraise=True)
    later = file.stat().st_mtime_ns + 2_000_000_000
    os.utime(file, ns=(later, later))
    assert run(other, LOADING, PYTHONDONTWRITEBYTECODE=written)[-1] == "0.25 0.2 0.2 0.2 0.25"


def test_modules_run_once(other: Project):
    """Where no bytecode is older than its source."""
    for _ in range(2):  # the second time with bytecode of the library
        said = run(other, "import sealed.rates")
        assert said == ["samebits.loader", "samebits", "sealed.early", "sealed", "sealed.rates"]


CHILD = """
import subprocess, sys
child = "import samebits.core.errors, sealed.rates; print(sealed.rates.RATE, type(sealed.rates.__loader__).__module__)"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.splitlines()[-1])
"""


def test_process_that_a_stage_starts_runs_no_older_bytecode_either(other: Project):
    """Such as a loader worker that is started anew: it imports the library before the owner's dataset."""
    file = other.package / "rates.py"
    file.write_text(file.read_text().replace(NEW, OLD))
    py_compile.compile(str(file), invalidation_mode=UNCHECKED, doraise=True)
    file.write_text(file.read_text().replace(OLD, NEW))
    assert run(other, CHILD)[-1] == "0.2 samebits.loader"
    assert run(other, f"import os\ndel os.environ[loader.VARIABLE]{CHILD}")[-1] == "0.1 _frozen_importlib_external"


def test_bytecode_without_its_source_is_not_loaded(other: Project):
    file = other.package / "rates.py"
    py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")), doraise=True)
    file.unlink()
    script = "try: import sealed.rates\nexcept ImportError as error: print(error)"
    message = f"{file.with_suffix('.pyc')}: bytecode whose source is gone is not loaded; restore the source"
    assert run(other, script)[-1] == message


def test_library_of_another_project_is_refused(other: Project):
    """Which is found first, as by PYTHONPATH: the address is made of the project's own."""
    script = """
from samebits.address import loaded
from samebits.core.errors import UserError
try:
    loaded.require_own_library(project)
except UserError as refused:
    print(refused)
"""
    assert run(other, script)[-1] == "samebits"
    said = run(other, script, PYTHONPATH=os.pathsep.join(OURS.path[1:] + other.path))[-1]
    message = "the library that runs lies in {}, and no hash covers it; this project's lies in {}. Put that one first"
    assert said.startswith(message.format(OURS.library, other.library))


# ---- what changes while a stage runs

LATE = """
import inspect, json, shutil
from samebits.address import loaded
from samebits.core.errors import UserError
loaded.remember(project)
package = project.package
changed, added = package / "rates.py", package / "added.py"
changed.write_text(changed.read_text().replace("0.2", "0.3").replace("return RATE", "return 0"))
shutil.rmtree(package / "removed")
added.write_text("")
import sealed.rates, sealed.removed.deep
seen = [sealed.rates.rate(), inspect.getsource(sealed.rates.rate), sealed.removed.deep.RATE, sealed.rates.__file__]
try:
    import sealed.added
except UserError as refused:
    seen.append(str(refused))
print(json.dumps(seen))
"""


def test_module_that_is_imported_late_is_that_of_the_begin(other: Project):
    (other.package / "removed").mkdir()
    for name in ("__init__", "deep"):
        (other.package / "removed" / f"{name}.py").write_text(NEW)
    rate, source, removed, file, refused = json.loads(run(other, LATE)[-1])
    assert (rate, source, removed, file) == (0.2, "def rate(): return RATE\n", 0.2, str(other.package / "rates.py"))
    assert refused.startswith("added.py: appeared after the stage had begun, so the content address lacks it")


def test_code_that_stays_is_not_refused(other: Project, capsys: pytest.CaptureFixture[str]):
    loaded.remember(other)
    loaded.require_unchanged(other)
    loaded.require_kept(other)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["rates.py", "new.py", "words.json"])
def test_code_that_changes_after_the_start_is_refused(name: str, other: Project):
    loaded.remember(other)
    (other.package / name).write_text(OLD)
    with pytest.raises(UserError, match=f"^{name}: changed while the stage started, so nobody knows what it loaded"):
        loaded.require_unchanged(other)


def test_change_while_the_stage_runs_is_told_and_refused_where_it_may_have_been_read(
    other: Project, capsys: pytest.CaptureFixture[str]
):
    loaded.remember(other)
    (other.package / "rates.py").write_text(OLD)
    for _ in range(2):  # told once
        loaded.require_kept(other)
    line = "rates.py: changed since the start; this outcome is that of the code as it was then\n"
    assert capsys.readouterr().err == line
    (other.package / "words.json").write_text("[]")
    with pytest.raises(UserError, match=r"^words\.json: changed while the stage ran, so nobody knows what it read"):
        loaded.require_kept(other)


def test_module_loaded_from_another_source_than_the_address_states_is_refused():
    """As in a notebook whose module was edited after its import, or in a worker that was started anew."""
    now = code(OURS)
    loaded.require_unchanged(OURS, now)
    loaded.require_same({OURS: now})
    other = now | {"samebits/core/errors.py": "0" * 64}
    with pytest.raises(UserError, match=r"^samebits/core/errors\.py: changed while the stage started"):
        loaded.require_unchanged(OURS, other)
    with pytest.raises(UserError, match=r"^samebits/core/errors\.py: changed before a worker loaded it"):
        _begin_worker(None, partial(loaded.require_same, {OURS: other}), 0)  # type: ignore[arg-type]
