"""The second person: a clone has the data, what it lacks is told once, and so is that git refuses the folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clone import project_in
from support import PROJECT

from samebits.core.errors import UserError
from samebits.record.code_state import code_state, public_files

RAW = Path("data", "raw", "digits.csv.gz")
COPIES = {
    "clone": "git clone --quiet {project} {copy}",
    "shallow": "git clone --quiet --depth 1 file://{project} {copy}",
    "archive": "mkdir {copy} && git -C {project} archive HEAD | tar x -C {copy}",
}


def copied(kind: str, copy: Path) -> Path:
    """What a second person has."""
    subprocess.run(["bash", "-c", COPIES[kind].format(project=PROJECT, copy=copy)], check=True)
    return copy


def repro(copy: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command with the copy's own code."""
    env = os.environ | {"PYTHONPATH": f"{copy}/src:{copy}/vendor"}
    return subprocess.run([sys.executable, "-m", *words], cwd=copy, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("kind", COPIES)
def test_missing_data_are_brought_and_one_line_says_so(kind: str, tmp_path: Path):
    copy = copied(kind, tmp_path / "copy")
    done = repro(copy, "samebits", "check-data")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"{RAW}: missing; DVC brings it from its cache or its remote\n"
    assert (copy / RAW).read_bytes() == (PROJECT / RAW).read_bytes()


def test_data_that_cannot_be_brought_are_told_once_with_remote_and_way(tmp_path: Path):
    copy = copied("clone", tmp_path / "copy")
    shutil.rmtree(copy / "data" / "remote")
    for words in (("samebits", "check-data"), ("pytest", "tests")):
        done = repro(copy, *words)
        said = done.stdout + done.stderr
        assert done.returncode == 2 and "Traceback" not in said, said
        assert said.count("DVC cannot bring it: its remote 'storage' (") == 1, said
        assert "data/remote): neither that remote nor DVC's cache has it. Whoever has the data runs: dvc push" in said


def test_folder_of_another_user_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    project = project_in(PROJECT)
    assert code_state(project)[0]["commit"]
    for name, value in {
        "TEST_ASSUME_DIFFERENT_OWNER": "1",
        "CONFIG_GLOBAL": os.devnull,
        "CONFIG_NOSYSTEM": "1",
    }.items():
        monkeypatch.setenv(f"GIT_{name}", value)
    for requested in (lambda: code_state(project), lambda: [*public_files(project, ["train.py"])]):
        with pytest.raises(UserError, match=r"belongs to another user.* git config --global --add safe.directory /"):
            requested()
