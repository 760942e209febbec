"""A stage that uses something which DVC or the content address does not know is refused by name; any other one runs."""

from pathlib import Path

import pytest
from small import Case, small

from samebits.address.address import code, core_files
from samebits.core import arithmetic
from samebits.core.errors import UserError
from samebits.guards.stages import core_unlisted


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return small(tmp_path, monkeypatch)


@pytest.mark.parametrize("stage", ["train", "prepare", "sub/dvc.yaml:train", "no such stage", ""])
def test_stage_that_lists_what_it_uses_runs(case: Case, stage: str):
    for name in ("src/tides/__init__", "src/tides/data", "vendor/samebits/run", "vendor/samebits/cli") + (
        ("src/tides/train",) * (stage != "prepare")
    ):
        case.load(f"src/tides/{name}.py")
    case.run(stage)


# ---- what dvc.yaml lacks


def test_missing_key_is_named(case: Case):
    case.edit("dvc.yaml", "params: [seed, data, determinism]", "params: [seed, data.shift]")
    said = case.refusal("train")
    assert said.startswith("dvc.yaml: params of stage train lack data, determinism: a change there would not run it")
    assert said.endswith("Add them and repeat: dvc repro")
    assert "params of stage train lack data, determinism" in case.refusal("sub/dvc.yaml:train")
    assert "params of stage sweep lack determinism" in case.refusal("sweep@2")
    case.run("")


@pytest.mark.parametrize("lost", ["src/tides", "vendor/samebits/core", "requirements/train-cpu.txt"])
def test_run_must_list_the_whole_package_and_the_locks_of_what_it_loads(case: Case, lost: str):
    case.write("requirements/dev.txt", "ruff==1\n")
    listed = "/prepared, ./requirements/train-cpu.txt, src/tides, vendor/samebits/core]"
    case.edit("dvc.yaml", listed, listed.replace(lost, f"{lost}/x"))
    assert f"dvc.yaml: deps of stage train lack {lost}: a change" in case.refusal("train")
    case.run("")


CORE, INTEGER = "vendor/samebits/core", "vendor/samebits/core/ARITHMETIC"


@pytest.mark.parametrize("stage", ["prepare", "train", "sweep@1"])
def test_edited_core_needs_its_folder_in_dvc_yaml(case: Case, stage: str):
    """The file with the integer is enough for a core as released."""
    case.edit("dvc.yaml", CORE, INTEGER)
    case.edit("dvc.yaml", "[seed, data]", "[seed, data, determinism]")
    case.write(INTEGER, "7\n")
    digest = arithmetic.digest(core_files(code(case.project)))
    case.write("vendor/samebits/core_releases.txt", f"{digest}  7\n")
    case.run(stage)
    assert core_unlisted(case.project) == []
    case.write(f"{CORE}/step.py", "")
    assert f"lack {CORE}: a change there would not run it again" in case.refusal(stage)
    line = f"{CORE} is edited, and DVC does not see it: in dvc.yaml, replace {INTEGER} with {CORE}"
    assert core_unlisted(case.project) == [line]
    case.edit("dvc.yaml", INTEGER, CORE)
    case.run(stage)
    assert core_unlisted(case.project) == []


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


@pytest.mark.parametrize(
    "name",
    ["common.py", "src/other/loss.py", "vendor/loss.py", "vendor/samebits/analysis/diff.py", "src/tides/.x/a.py"],
)
@pytest.mark.parametrize("stage", ["train", ""])
def test_module_outside_the_address_is_refused_with_dvc_and_without(case: Case, name: str, stage: str):
    case.write(name, "")
    case.load(name)
    assert case.refusal(stage).startswith(f"{name}: loaded, but not in the content address: a change there would go un")


def test_module_that_somebody_adds_to_the_library_is_refused(case: Case):
    """The library's own around core are in no address, and are let through."""
    own, added = "vendor/samebits/run.py", "vendor/samebits/losses.py"
    case.write("vendor/samebits/library.sha256", f"{'0' * 64}  run.py\n")
    case.load(own)
    case.run("")
    case.write(added, "")
    case.load(added)
    assert case.refusal("").startswith(f"{added}: loaded, but not in the content address: ")
    assert case.refusal("").endswith("Move it into src/tides")


# ---- what changes while a stage runs: DVC looks at it afterwards

CHANGES = {
    "src/tides/train.py": lambda case: case.write("src/tides/train.py", "pass\n"),
    "vendor/samebits/core/step.py": lambda case: case.write("vendor/samebits/core/step.py", "pass\n"),
    "src/tides/new.py": lambda case: case.write("src/tides/new.py", ""),
    "src/tides/words.json": lambda case: case.write("src/tides/words.json", "[]"),
    "requirements/train-cpu.txt": lambda case: case.edit("requirements/train-cpu.txt", "2.4.6", "2.4.5"),
    "data.shift": lambda case: case.edit("params.yaml", "shift: 1", "shift: 2"),
}
HARMLESS = {
    "a neutral section": lambda case: case.edit("params.yaml", "here", "there"),
    "a remark in a lock": lambda case: case.edit("requirements/train-cpu.txt", "tides", "others"),
    "another lock": lambda case: case.write("requirements/dev.txt", "ruff==1\n"),
    "the library around its core": lambda case: case.write("vendor/samebits/run.py", "pass\n"),
    "analysis": lambda case: case.write("vendor/samebits/analysis/diff.py", "pass\n"),
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
        raise UserError("of its own")

    assert case.refusal("train", fail) == "of its own"


# ---- another project's code
