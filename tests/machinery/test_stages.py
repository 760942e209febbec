"""A stage that uses something which DVC or the content address does not know is refused by name; any other one runs."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from project.repro.asked.stages import require_own, watched
from project.repro.errors import Refused
from project.repro.project import Project

PIPELINE = """
stages:
  prepare:
    deps: ["${data.raw}", src/tides/__init__.py, src/tides/data.py, src/tides/repro/]
    params: [data, determinism]
  train:
    deps: [data/prepared, ./requirements, src/tides]
    params: [seed, data, determinism]
  sweep:
    foreach: [1, 2]
    do:
      deps: [requirements, src/tides]
      params: [seed, data]
"""
PARAMS = "seed: 0\ndata: {raw: data/raw.csv, shift: 1}\ndeterminism: {cpu: portable}\ntracking: {uri: here}\n"
SECTIONS = ["seed", "data", "determinism"]
FILES = {
    "dvc.yaml": PIPELINE,
    "params.yaml": PARAMS,
    "requirements/cpu.txt": "numpy==2.4.6  # via tides\n",
    "README.md": "\n",
    **{
        f"src/tides/{name}.py": "" for name in ("__init__", "data", "train", "repro/run", "repro/cli", "repro/lab/diff")
    },
}


@dataclass
class Case:
    """A small project, and the means to say that DVC runs a stage of it and that modules are loaded."""

    project: Project
    monkeypatch: pytest.MonkeyPatch

    def write(self, name: str, text: str) -> None:
        path = self.project.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.project.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def load(self, file: str | Path) -> None:
        """Have a module in this process that came from a file, named from the project's root."""
        module = ModuleType(f"of {file}")
        module.__file__ = str(self.project.root / file)
        self.monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(self, stage: str, during: Callable[[], None] = lambda: None) -> None:
        """The stage under DVC, or without it where `stage` is empty; `during` happens while it runs."""
        self.monkeypatch.setenv("DVC_STAGE", stage)
        prepares = stage == "prepare"
        with watched(self.project, ["data", "determinism"] if prepares else SECTIONS, whole=not prepares):
            during()

    def refusal(self, stage: str, during: Callable[[], None] = lambda: None) -> str:
        with pytest.raises(Refused) as refused:
            self.run(stage, during)
        assert "\n" not in str(refused.value)
        return str(refused.value)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A project in which nothing is wrong."""
    case = Case(Project(tmp_path / "src" / "tides"), monkeypatch)
    for name, text in FILES.items():
        case.write(name, text)
    monkeypatch.chdir(tmp_path)
    return case


@pytest.mark.parametrize("stage", ["train", "prepare", "sub/dvc.yaml:train", "no such stage", ""])
def test_stage_that_lists_what_it_uses_runs(case: Case, stage: str):
    for name in ("__init__", "data", "repro/run", "repro/cli") + ("train",) * (stage != "prepare"):
        case.load(f"src/tides/{name}.py")
    case.run(stage)


# ---- what dvc.yaml lacks


def test_missing_key_is_named(case: Case):
    case.edit("dvc.yaml", "params: [seed, data, determinism]", "params: [seed, data.shift]")
    said = case.refusal("train")
    assert said.startswith("dvc.yaml: params of stage train lack data, determinism: a change there would not run it")
    assert said.endswith("Add them and repeat: dvc repro")
    assert "params of stage train lack data, determinism" in case.refusal("sub/dvc.yaml:train")
    case.run("")


def test_stages_of_a_loop_are_found(case: Case):
    assert "params of stage sweep lack determinism" in case.refusal("sweep@2")


@pytest.mark.parametrize("lost", ["src/tides", "requirements"])
def test_run_must_list_the_whole_package_and_all_locks(case: Case, lost: str):
    listed = "/prepared, ./requirements, src/tides]"
    case.edit("dvc.yaml", listed, listed.replace(lost, f"{lost}/x"))
    assert f"dvc.yaml: deps of stage train lack {lost}: a change" in case.refusal("train")
    case.run("")


def test_module_that_was_loaded_must_be_listed(case: Case):
    case.load("src/tides/train.py")
    assert "deps of stage prepare lack src/tides/train.py: a change there would not run it" in case.refusal("prepare")


def test_module_loaded_late_is_found_when_the_stage_ends(case: Case):
    said = case.refusal("prepare", lambda: case.load("src/tides/train.py"))
    assert "deps of stage prepare lack src/tides/train.py" in said


def test_module_that_is_a_linked_file_is_found(case: Case, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "shared.py"
    elsewhere.write_text("")
    (case.project.package / "shared.py").symlink_to(elsewhere)
    case.load("src/tides/shared.py")
    assert "deps of stage prepare lack src/tides/shared.py" in case.refusal("prepare")


def test_file_that_is_not_python_must_be_listed(case: Case):
    """It may be read, and nobody would see that."""
    case.write("src/tides/words.json", "[]")
    assert "deps of stage prepare lack src/tides/words.json" in case.refusal("prepare")
    case.edit("dvc.yaml", "src/tides/data.py,", "src/tides/data.py, src/tides/words.json,")
    case.run("prepare")


def test_many_missing_files_are_counted(case: Case):
    for number in range(8):
        case.write(f"src/tides/words{number}.json", "[]")
    assert "words4.json and 3 more: a change" in case.refusal("prepare")


# ---- what the content address lacks


@pytest.mark.parametrize("name", ["common.py", "src/other/loss.py", "src/tides/repro/lab/diff.py", "src/tides/.x/a.py"])
@pytest.mark.parametrize("stage", ["train", ""])
def test_module_outside_the_address_is_refused_with_dvc_and_without(case: Case, name: str, stage: str):
    case.write(name, "")
    case.load(name)
    assert case.refusal(stage).startswith(f"{name}: loaded, but not in the content address: a change there would go un")


def test_modules_of_others_are_none_of_the_projects_business(case: Case, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "library.py"
    elsewhere.write_text("")
    for name in ("tests/conftest.py", "requirements/check_locks.py", ".venv/lib/library.py"):
        case.write(name, "")
    case.monkeypatch.setattr(sys, "prefix", str(case.project.root / ".venv"))
    for name in (
        elsewhere,
        "tests/conftest.py",
        "requirements/check_locks.py",
        ".venv/lib/library.py",
        "_no_such_file.py",
    ):
        case.load(name)
    case.run("train")


# ---- what changes while a stage runs: DVC looks at it afterwards

CHANGES = {
    "src/tides/train.py": lambda case: case.write("src/tides/train.py", "pass\n"),
    "src/tides/new.py": lambda case: case.write("src/tides/new.py", ""),
    "src/tides/words.json": lambda case: case.write("src/tides/words.json", "[]"),
    "requirements/cpu.txt": lambda case: case.edit("requirements/cpu.txt", "2.4.6", "2.4.5"),
    "data.shift": lambda case: case.edit("params.yaml", "shift: 1", "shift: 2"),
}
HARMLESS = {
    "a neutral section": lambda case: case.edit("params.yaml", "here", "there"),
    "a remark in a lock": lambda case: case.edit("requirements/cpu.txt", "tides", "others"),
    "the lab": lambda case: case.write("src/tides/repro/lab/diff.py", "pass\n"),
    "bytecode": lambda case: case.write("src/tides/__pycache__/train.pyc", "pass\n"),
    "the README": lambda case: case.write("README.md", "changed\n"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_while_a_stage_runs_is_refused_with_a_way_to_keep_the_outcome(case: Case, name: str):
    said = case.refusal("train", lambda: CHANGES[name](case))
    assert said.startswith(f"{name}: changed while stage train ran") and "dvc commit train" in said


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_change_while_a_stage_runs_is_let_through(case: Case, name: str):
    case.run("train", lambda: HARMLESS[name](case))


def test_change_of_what_a_stage_does_not_list_is_let_through(case: Case):
    case.run("prepare", lambda: case.edit("params.yaml", "seed: 0", "seed: 1"))
    case.run("prepare", lambda: case.write("src/tides/train.py", "pass\n"))
    case.run("", lambda: case.write("src/tides/train.py", ""))


def test_stage_that_fails_keeps_its_own_words(case: Case):
    def fail() -> None:
        case.write("src/tides/new.py", "")
        raise Refused("of its own")

    assert case.refusal("train", fail) == "of its own"


# ---- another project's code


def test_code_of_another_project_is_refused(case: Case, tmp_path_factory: pytest.TempPathFactory):
    """As with an editable installation in a venv that two clones share, or in DVC's copy for an experiment."""
    case.monkeypatch.chdir(tmp_path_factory.mktemp("clone"))
    said = case.refusal("train")
    assert said.startswith(f"stage train runs in {Path.cwd()}, but with the code in {case.project.package}")
    assert "PYTHONPATH=src" in said
    case.run("")


def test_project_behind_a_link_is_the_same_one(case: Case, tmp_path_factory: pytest.TempPathFactory):
    link = tmp_path_factory.mktemp("link") / "project"
    link.symlink_to(case.project.root)
    require_own(Project(link / "src" / "tides"), "a test is run")
