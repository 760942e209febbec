"""`make repro` shows what runs and what the stages say, and nothing that a user cannot use."""

import os
import subprocess
from pathlib import Path

import pytest
from clone import commit, copied, project_in
from ruamel.yaml import YAML
from support import HERE, python

from samebits.analysis import outputs

STAGES = """
stages:
  first:
    cmd: cat data > first && echo first has spoken
    deps: [data]
    outs: [first]
  second:
    cmd: "%s"
    deps: [first]
    outs: [second]
"""
ADVICE = "To track the changes with git", "core.autostage", "dvc push"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git repository with two stages of DVC."""
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("[core]\n    analytics = false\n    check_update = false\n")
    (tmp_path / "data").write_text("1")
    write(tmp_path, "cp first second")
    return tmp_path


def write(project: Path, command: str) -> None:
    """Have the second stage run this command."""
    (project / "dvc.yaml").write_text(STAGES % command)


def repro(project: Path) -> subprocess.CompletedProcess[str]:
    """What `make repro` calls."""
    return python("-m", "samebits", "pipeline", cwd=project)


def test_stages_are_named_and_nothing_else_is_said(project: Path):
    done = repro(project)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "Running stage 'first':",
        "> cat data > first && echo first has spoken",
        "first has spoken",
        "Running stage 'second':",
        "> cp first second",
    ]
    assert (project / "dvc.lock").is_file()
    again = repro(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "nothing has changed since dvc.lock\n", "")


def test_outputs_are_compared_as_dvc_stores_them(project: Path):
    """Files and folders, which may be links into DVC's cache."""
    link = "mkdir -p second/deep && cp first second/deep/b && echo 2 > second/c"
    write(project, link)
    with (project / ".dvc" / "config").open("a") as config:
        config.write("[cache]\n    type = symlink\n")
    assert repro(project).returncode == 0 and (project / "second" / "c").is_symlink()
    commit(project, "made")
    ours = project_in(project)
    said = "the outputs are those of the committed dvc.lock"
    assert outputs.committed(ours, outputs.stages(ours)) == (True, said)
    (project / "second" / "c").unlink()
    (project / "second" / "c").write_text("3")
    holds, message = outputs.committed(ours, outputs.stages(ours))
    assert not holds and message.startswith("the outputs are not those of the committed dvc.lock: second: missing, alt")


@pytest.mark.long
def test_dvc_alone_says_more(project: Path):
    """Else there would be no reason for a call of our own."""
    done = python("-m", "dvc", "repro", cwd=project)
    assert done.returncode == 0 and all(words in done.stdout for words in ADVICE)


ENDS = {
    "echo no such data >&2; exit 2": (2, "no such data"),
    "echo no such data >&2; exit 143": (143, "no such data"),
    "kill -KILL $$": (137, "failed to reproduce 'second'"),  # it dies without a word
}


@pytest.mark.parametrize("stage", ENDS)
def test_stage_that_fails_has_the_last_word_or_is_named_and_gives_the_exit_code(stage: str, project: Path):
    code, said = ENDS[stage]
    write(project, stage)
    done = repro(project)
    assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout.splitlines()[-1] == f"> {stage}"


def test_what_dvc_itself_refuses_is_told(project: Path):
    (project / "data").unlink()
    done = repro(project)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "failed to reproduce 'first'" in line and str(project / "data") in line
    (project / "dvc.yaml").write_text("stages: 7\n")
    done = repro(project)
    assert done.returncode == 1 and "dvc.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_stage_in_a_copy_of_the_project_runs_the_code_of_the_copy(tmp_path: Path):
    """As in the copies of `dvc exp run --temp`, while the original is installed and so found by every process."""
    files = "params.yaml", "dvc.yaml", "pyproject.toml"
    clone = copied(tmp_path / "copy", ("src", "vendor", "requirements", "data/raw"), files)
    installed = {"PYTHONPATH": os.pathsep.join(HERE)}
    command = YAML(typ="safe").load((clone / "dvc.yaml").read_text())["stages"]["prepare"]["cmd"]
    assert command == "PYTHONPATH=src:vendor python -m samebits prepare"
    for line, code in ((command, 0), (command.partition(" ")[2], 2)):
        done = subprocess.run(line, shell=True, cwd=clone, env=os.environ | installed, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "Put that one first: PYTHONPATH=src:vendor" in done.stderr
    stages = YAML(typ="safe").load((clone / "dvc.yaml").read_text())["stages"]
    assert all(stage["cmd"].startswith("PYTHONPATH=src:vendor python -m samebits ") for stage in stages.values())
