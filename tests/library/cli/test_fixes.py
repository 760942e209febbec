"""A fix around the library's core, or of the wording of core, leaves results valid and unfinished runs resumable."""

import json
from pathlib import Path

import pytest
import released
from clone import SETTINGS, command, copied, project_in
from support import python, training

from samebits.address.address import in_core
from samebits.address.manifest import sha256_file
from samebits.base.files import read_json, write_json
from samebits.core import ARITHMETIC

STOPPED = "trace.values=7"


def train(project: Path, out: str, *settings: str) -> str:
    """Train in that project to the end, or until it is to stop, and return what it says."""
    arguments = training(project / out, project / "data" / "prepared", *SETTINGS, *settings)
    done = command(project, "train", *arguments)
    assert done.returncode == (143 if STOPPED in settings else 0), done.stderr
    return done.stdout + done.stderr


def plant(project: Path, core: bool) -> list[str]:
    """Append a line to each module of the library, in core or around it; return their names."""
    library = project_in(project).library
    names = [path.relative_to(library).as_posix() for path in library.rglob("*.py")]
    planted = [name for name in names if in_core(name) == core]
    for name in planted:
        with (library / name).open("a") as file:
            file.write("planted = 1\n")
    return planted


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with a finished run and one that stopped after step 7, and with a library that changed since.

    Core has other comments, and the release command has listed it. The modules around core are edited.
    """
    folder = tmp_path_factory.mktemp("fixed")
    copied(folder, ("src", "vendor", "requirements", "data/raw"), ("params.yaml", "pyproject.toml"))
    assert command(folder, "prepare").returncode == 0
    train(folder, "finished")
    train(folder, "unfinished", STOPPED)
    assert not (folder / "unfinished" / "model.safetensors").exists()
    for path in (folder / "vendor" / "samebits" / "core").glob("*.py"):
        path.write_text(f"{path.read_text()}# a comment\n")
    released.list_library(folder / "vendor" / "samebits")
    assert len(plant(folder, core=False)) > 80
    record(folder / "unfinished")
    return folder


def record(run: Path) -> None:
    """Have a run be of an older release, which lacked a neutral key."""
    held = read_json(run / "run.json")
    for key in ("checkpoint.keep", "integrity.compare_every"):
        del held["config"][key]
    write_json(run / "run.json", held)


@pytest.mark.long
def test_finished_run_is_one_of_the_project_as_it_stands(fixed: Path):
    """By its address, all of it, with which `samebits check` and results.lock compare."""
    requested = training(fixed / "finished", fixed / "data" / "prepared", *SETTINGS)[:-2]  # but for --out
    done = command(fixed, "address", *requested)
    before, now = read_json(fixed / "finished" / "address.json"), json.loads(done.stdout)
    assert done.returncode == 0 and before.pop("core_files") != now.pop("core_files") and before == now


@pytest.mark.long
def test_unfinished_run_resumes_to_the_same_bits(fixed: Path):
    assert "resumed " in train(fixed, "unfinished")
    one, other = (fixed / out / "model.safetensors" for out in ("finished", "unfinished"))
    assert sha256_file(one) == sha256_file(other)
    one, other = (read_json(fixed / out / "receipt.json")["predicate"] for out in ("finished", "unfinished"))
    assert one["address"] == other["address"] and one["trace"] == other["trace"]
    assert one["preimage"]["core"] == other["preimage"]["core"] == {"arithmetic": ARITHMETIC}
    assert one["library"]["digest"] != other["library"]["digest"] and len(other["library"]["modified"]) > 80


NOTING = """
import atexit, json, os, sys
def note():
    with open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.json"), "w") as file:
        json.dump([os.path.basename(sys.argv[0]), sorted({name.partition(".")[0] for name in sys.modules})], file)
atexit.register(note)
"""


@pytest.mark.long
def test_training_imports_no_mlflow(fixed: Path, tmp_path: Path):
    """MLflow is the uploader's, DVC its caller's; each process notes at its end what it has imported."""
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    settings = [word for word in SETTINGS if not word.startswith("tracking")]
    arguments = training(fixed / "tracked", fixed / "data" / "prepared", *settings, "unhashed.modules=[sitecustomize]")
    path = f"{tmp_path}:{fixed}/src:{fixed}/vendor"
    env = {"PYTHONPATH": path, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db"}
    done = python("-m", "samebits", "train", *arguments, cwd=fixed, env=env)
    assert done.returncode == 0 and "tracked    sqlite:///" in done.stdout, done.stdout + done.stderr
    noted = [read_json(path) for path in tmp_path.glob("*.json")]
    (trained,) = [set(names) for program, names in noted if program == "__main__.py" and "torch" in names]
    (uploaded,) = [set(names) for program, names in noted if program == "tracking.py"]
    others = {"mlflow", "dvc", "sqlalchemy", "pandas", "scipy", "matplotlib", "pytest"}
    assert not trained & others and {"mlflow", "sqlalchemy"} <= uploaded


@pytest.mark.long
def test_run_of_another_core_is_another_run(fixed: Path):
    """A control: core is not outside of the address."""
    train(fixed, "stopped", STOPPED)
    names = plant(fixed, core=True)
    done = command(fixed, "train", *training(fixed / "stopped", fixed / "data" / "prepared", *SETTINGS))
    assert done.returncode == 2 and f"another content address ({min(names).replace('/', '.', 1)}: " in done.stderr, (
        done.stderr
    )
