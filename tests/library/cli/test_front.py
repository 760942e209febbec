"""The front door: the environment stands before torch is imported, and each of the owner's modules is watched."""

import ast
import json
import os
import shutil
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from clone import cold, command, copied, edit, project_in
from support import PACKAGE, PROJECT, Trained, python, training

import samebits
from samebits import testing
from samebits.address.manifest import sha256_file
from samebits.config.settings import Determinism
from samebits.core.flag_table import ALLOCATION
from samebits.core.flags import applicable, missing_variables
from samebits.record.lock import RunLock

STRICT = Determinism(cpu="portable", relax=())
VARIABLES = [flag.name for flag in applicable(STRICT) if flag.setting]
COPIED = ("src", "vendor", "requirements", "data/raw"), ("params.yaml", "pyproject.toml", "dvc.yaml")
OWN = {"MALLOC_TRIM_THRESHOLD_": "1048576"}

NOTING = """
import json, os, sys

def note(event):
    facts = {"event": event, "pid": os.getpid(), "arguments": sys.orig_argv,
             "hashes_randomised": sys.flags.hash_randomization, "environ": dict(os.environ)}
    with open(os.environ["NOTES"], "a") as notes:
        print(json.dumps(facts), file=notes)

def hook(event, arguments):
    if event == "import" and arguments[0] in ("torch", "numpy"):
        note(arguments[0])
        os._exit(0)

note("start")
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def ready(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this project whose data are prepared, so that no stage starts another one."""
    project = copied(tmp_path_factory.mktemp("ready") / "project", *COPIED)
    shutil.copytree(prepared, project / "data" / "prepared")
    return project


def notes_of(project: Path, tmp_path: Path, words: tuple[str, ...], env: dict[str, str | None]) -> list[dict[str, Any]]:
    """What a stage notes at each start of its process, and when it first imports torch or numpy and ends."""
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    notes = tmp_path / "notes"
    path = os.pathsep.join(map(str, [tmp_path, *project_in(project).path]))
    env = env | {"PYTHONPATH": path, "NOTES": str(notes)}
    done = python("-X", "dev", "-m", *words, "--set", "seed=5", cwd=project, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in notes.read_text().splitlines()]


def unset_at_import(notes: list[dict[str, Any]]) -> list[str]:
    """The variables that were not in place when torch or numpy was first imported."""
    return list(missing_variables(STRICT, notes[-1]["environ"]))


STAGES = [("samebits", stage) for stage in ("prepare", "train", "evaluate")]


@pytest.mark.parametrize("stage", STAGES)
def test_stage_starts_again_once_and_is_strict_before_torch_is_imported(
    ready: Path, tmp_path: Path, stage: tuple[str, ...]
):
    notes = notes_of(ready, tmp_path, stage, dict.fromkeys(VARIABLES))
    assert [note["event"] for note in notes[:-1]] == ["start", "start"]
    assert notes[-1]["event"] in ("torch", "numpy") and unset_at_import(notes) == []
    assert len({note["pid"] for note in notes}) == 1
    assert notes[0]["arguments"][1:] == notes[1]["arguments"][1:]
    assert [note["hashes_randomised"] for note in notes] == [1, 0, 0]


def test_stage_with_everything_in_place_does_not_start_again(ready: Path, tmp_path: Path):
    notes = notes_of(ready, tmp_path, STAGES[0], {})
    assert [note["event"] for note in notes[:-1]] == ["start"] and unset_at_import(notes) == []


@pytest.mark.parametrize("own", [{}, OWN])
def test_training_keeps_memory_as_the_table_says_or_as_its_user_does(ready: Path, tmp_path: Path, own: dict[str, str]):
    notes = notes_of(ready, tmp_path, STAGES[1], {**dict.fromkeys(ALLOCATION), **own})
    assert [note["event"] for note in notes[:-1]] == ["start"] * (1 if own else 2)
    environ = notes[-1]["environ"]
    assert {name: environ[name] for name in [*ALLOCATION, *OWN] if name in environ} == (own or ALLOCATION)


# ---- by which command a stage is started

TORCHRUN = ("torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2", "-m")


@pytest.mark.long
def test_torchrun_of_the_module_gives_the_same_bits(prepared: Path, tmp_path: Path, untracked: Trained):
    words = training(tmp_path / "run", prepared, "tracking.enabled=false")
    done = python("-m", *TORCHRUN, f"{PACKAGE}.train", *words)
    assert done.returncode == 0, done.stderr
    assert sha256_file(tmp_path / "run" / "model.safetensors") == untracked.weights


@pytest.mark.parametrize("stage", ["prepare", "train", "evaluate"])
def test_module_of_a_stage_is_that_stage_and_keeps_the_options_of_python(stage: str):
    done = python("-X", "importtime", *("-m", f"{PACKAGE}.{stage}", "--help"))
    assert done.returncode == 0 and done.stdout.startswith(f"Usage: python -m samebits {stage} "), done.stderr
    assert done.stderr.count("import time: self [us]") == 2


# ---- the owner's modules


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of this project to plant faults in."""
    return copied(tmp_path / "other", *COPIED)


def refused(project: Path, stage: str) -> str:
    """The line with which a stage is refused."""
    done = command(project, stage)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr + done.stdout
    return done.stderr.strip()


FAULTS = {
    "no function": (
        "prepare",
        "def prepare(",
        "def prepared(",
        "no function prepare seen, def prepare(config, raw, fol",
    ),
    "another thing": ("prepare", "def prepare(", "prepare = 3\ndef prepared(", "prepare = 3 seen, def prepare(config"),
    "no config": (
        "config",
        "class Config(sb.Settings)",
        "class Keys(sb.Settings)",
        "no class Config seen, class Config(s",
    ),
    "another config": ("config", "class Config(sb.Settings)", "class Config", "Config = <class"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_module_without_what_a_stage_needs_is_refused_in_a_line(fault: str, other: Path):
    module, old, new, said = FAULTS[fault]
    edit(other / "src" / PACKAGE / f"{module}.py", (old, new))
    assert refused(other, "prepare").startswith(f"src/{PACKAGE}/{module}.py: {said}")


NOWHERE = (
    "No module named 'nowhere'. If pyproject.toml names its package: make setup. Else add it there, then make lock"
)
# What is wrong -> the place in prepare.py, an import in it, and the line about it.
IMPORTS = {
    "an older layout": (
        "import samebits as sb",
        "from samebits.start import launch",
        "cannot import name 'launch' from 'samebits.start'. The library's names come from samebits alone; for an",
    ),
    "no such package": ("import samebits as sb", "import nowhere.at_all", NOWHERE),
    "none in a function": ("images, labels =", "import nowhere; images, labels =", NOWHERE),
    "no such name": (
        "from .config import Data",
        "from .config import Date",
        f"cannot import name 'Date' from '{PACKAGE}.config'. Mend that line",
    ),
}


@pytest.mark.parametrize("fault", IMPORTS)
def test_import_that_fails_is_told_in_a_line(fault: str, other: Path):
    old, new, said = IMPORTS[fault]
    path = other / "src" / PACKAGE / "prepare.py"
    edit(path, (old, new))
    place = path.read_text().partition(new)[0].count("\n") + 1
    assert refused(other, "prepare").startswith(f"src/{PACKAGE}/prepare.py:{place}: {said}")


def test_import_that_fails_within_another_module_keeps_its_traceback(other: Path):
    """The owner's line is not to blame."""
    (other / "src" / "broken.py").write_text("from json import nothing\n")
    edit(other / "src" / PACKAGE / "prepare.py", ("import samebits as sb", "import broken"))
    done = cold(other, "prepare")
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "broken.py" in done.stderr, done.stderr


def test_missing_module_is_refused_and_not_another_projects_taken(other: Path):
    """This project has one of that name, too, and lies behind it on Python's path."""
    (other / "src" / PACKAGE / "prepare.py").unlink()
    own = os.pathsep.join([f"{other}/vendor", f"{other}/src", os.environ["PYTHONPATH"]])
    done = python("-m", "samebits", "prepare", cwd=other, env={"PYTHONPATH": own})
    assert (done.returncode, done.stderr) == (2, f"src/{PACKAGE}/prepare.py: missing; restore it from git\n")


def test_package_of_the_folder_runs_before_one_of_the_same_name(other: Path):
    edit(other / "src" / PACKAGE / "prepare.py", ("def prepare(", "print('this one')\ndef prepare("))
    own = os.pathsep.join([f"{other}/vendor", os.environ["PYTHONPATH"]])
    done = python("-m", "samebits", "prepare", cwd=other, env={"PYTHONPATH": own})
    assert done.returncode == 0 and done.stdout.startswith("this one\n"), done.stderr


def test_variables_that_the_code_reads_stand_in_the_record_by_name(
    other: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
):
    """Read in several ways, set or not; never a value, and none that the library or torch reads."""
    reads = "import os\nHERE = os.getenv('FIRST'), os.environ.get('SECOND'), 'THIRD' in os.environ\n\nclass ConvNet("
    edit(other / "src" / PACKAGE / "model.py", ("class ConvNet(", reads))
    monkeypatch.setenv("FIRST", "a value")
    done = command(other, "train", *training(other / "run", prepared, "tracking.enabled=false"))
    assert done.returncode == 0, done.stderr
    record = (other / "run" / "run.json").read_text()
    assert json.loads(record)["variables"] == ["FIRST", "SECOND", "THIRD"] and "a value" not in record


OPENS = "import json\nfrom pathlib import Path\n{}\nclass Model("
READS = 'WIDTH = json.loads(Path("width.json").read_text())\n'


@pytest.mark.long
@pytest.mark.parametrize("module", ["config", "model"])
def test_file_that_a_module_opens_while_it_is_imported_is_refused(module: str, other: Path, prepared: Path):
    """config.py, too, whose keys are wanted before anything else of the owner's."""
    (other / "width.json").write_text("8")
    path = other / "src" / PACKAGE / f"{module}.py"
    path.write_text(f"import json\nfrom pathlib import Path\n{READS}{path.read_text()}")
    done = command(other, "train", *training(other / "run", prepared, "tracking.enabled=false"))
    line = f"width.json (by {module}.py:3): opened, but not in the content address"
    assert done.returncode == 2 and done.stderr.startswith(line), done.stderr
    edit(other / "params.yaml", ("  files: []", "  files: [width.json]"))
    done = command(other, "train", *training(other / "run", prepared, "tracking.enabled=false"))
    assert done.returncode == 0, done.stderr


def test_folder_that_is_no_project_is_told(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    for words in (["train"], ["verify"], ["address"]):
        done = python("-m", "samebits", *words, cwd=tmp_path)
        said = f"{tmp_path}/pyproject.toml: no package in [tool.samebits] seen"
        assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr
    assert python("-m", "samebits", "--help", cwd=tmp_path).returncode == 0


# ---- the public names


def test_import_of_the_library_is_fast_and_loads_no_torch():
    code = "import sys, samebits; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = python("-c", code).stdout.split()
    assert not {"torch", "numpy", "pydantic", "click"} & {*loaded} and "samebits" in loaded
    code = "import sys, samebits as sb; sb.Section, sb.Neutral, sb.main; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"


def test_each_public_name_for_tests_is_documented_and_loads_no_torch():
    code = "import sys, samebits.testing; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"
    own = {name: value for name, value in vars(testing).items() if getattr(value, "__module__", "") == testing.__name__}
    own |= {f"tested.{name}": value for name, value in vars(testing.Tested).items() if callable(value)}
    public = {name: value for name, value in own.items() if not name.removeprefix("tested.").startswith("_")}
    page = (Path(samebits.__file__).parent / "docs" / "your-model.md").read_text()
    assert len(public) > 12 and [name for name in public if f"`{name}" not in page] == []
    assert [name for name, value in public.items() if not value.__doc__] == []


def test_each_public_name_is_known_to_type_checkers_and_documented():
    tree = ast.parse(Path(samebits.__file__).read_text())
    (checking,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {(node.module, alias.name) for node in checking.body for alias in getattr(node, "names", ())}
    assert seen == {(module, name) for module, names in samebits.PUBLIC.items() for name in names}
    for name in samebits.__all__:
        value = getattr(samebits, name)
        assert name in ("Neutral", "Environment") or value.__doc__, name
    with pytest.raises(AttributeError, match=f"no public name 'runs'; it has {', '.join(samebits.__all__)}"):
        samebits.runs  # noqa: B018


# ---- begun anew


@pytest.mark.long
def test_fresh_run_leaves_the_one_of_before_to_be_gone_on_with(prepared: Path, tmp_path: Path, untracked: Trained):
    """On two ranks, of which the first command moves it once."""
    out, off = tmp_path / "run", "tracking.enabled=false"

    def train(out: Path, *words: str) -> tuple[int, str, str]:
        done = command(PROJECT, "train", *training(out, prepared, off), *words)
        return done.returncode, done.stdout, done.stderr

    code, _, said = train(out, "--fresh", "--set", "trace.values=3")
    assert code == 143 and "is kept in" not in said and not (out / "earlier").exists()
    (out / "note.txt").write_text("the owner's")
    code, printed, said = train(out, "--fresh", "--ranks", "2")
    (earlier,) = (out / "earlier").iterdir()
    assert code == 0 and said == f"the run in {out} is kept in {earlier}\n" and "resumed" not in printed
    assert (out / "note.txt").is_file() and [*earlier.glob("checkpoints/000000004-*")]
    code, printed, _ = train(earlier, "--quiet")
    assert code == 0 and printed.startswith(f"resumed {earlier} after step 4\nweights ")
    weights = [sha256_file(each / "model.safetensors") for each in (out, earlier, untracked.out)]
    assert len(set(weights)) == 1

    assert train(out, "--fresh")[0] == 0
    assert len([*(out / "earlier").iterdir()]) == 2


def test_run_that_another_process_writes_is_not_moved(tmp_path: Path, untracked: Trained, prepared: Path):
    out = Path(shutil.copytree(untracked.out, tmp_path / "run"))
    lock = RunLock(out)
    lock.acquire()
    done = command(PROJECT, "train", *training(out, prepared), "--fresh")
    lock.release()
    assert done.returncode == 2 and str(out) in done.stderr and (out / "receipt.json").is_file()


# ---- data that are not prepared yet

MISSING = "data/prepared/manifest.json: missing. Preparing the data\n"


@pytest.mark.long
def test_trainings_that_begin_at_one_time_prepare_missing_data_once(other: Path, untracked: Trained):
    """As tasks of an array do in a new clone; and to the bits of any other run."""
    out, prepared = Path("runs"), Path("data", "prepared")
    words = [training(out / name, prepared, "tracking.enabled=false") for name in "ab"]
    with ThreadPool(2) as pool:
        done = pool.map(lambda each: command(other, "train", *each), words)
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert sum(MISSING in each.stderr for each in done) == 1
    assert {sha256_file(other / out / name / "model.safetensors") for name in "ab"} == {untracked.weights}


def test_data_that_overrides_ask_for_are_not_prepared_by_a_training(other: Path):
    """For the dataset's own stage would be given other keys then."""
    done = command(other, "train", "--set", "data.test_percent=30")
    assert (done.returncode, done.stderr) == (
        2,
        "data/prepared/manifest.json: missing. Prepare the data first: make repro\n",
    )
