"""The variables of torchrun, and places that cannot be had: a line and exit code 2."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from project.config import Config
from support import OURS

from samebits import front
from samebits.core import errors
from samebits.core.errors import UserError, of_system
from samebits.core.place import number, rank_and_size

MEETING = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# What stands in the environment -> what is told of it.
WRONG: dict[str, tuple[dict[str, str], str]] = {
    "rank": ({"RANK": "x"}, "RANK='x' is set, a whole number wanted; torchrun sets it"),
    "empty": ({"RANK": ""}, "RANK='' is set, a whole number wanted"),
    "half": ({"WORLD_SIZE": "1.5"}, "WORLD_SIZE='1.5' is set, a whole number wanted"),
    "negative": ({"RANK": "-1"}, "RANK='-1' is set, a whole number wanted"),
    "port": (MEETING | {"MASTER_PORT": "x"}, "MASTER_PORT='x' is set, a whole number wanted"),
    "none": ({"WORLD_SIZE": "0"}, "RANK=0 is set, a rank below the world size 0 wanted"),
    "beyond": ({"RANK": "1"}, "RANK=1 is set, a rank below the world size 1 wanted (WORLD_SIZE)"),
    "alone": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, and RANK is not"),
    "nowhere": ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 is set, and MASTER_ADDR is not"),
}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank of anything."""
    for name in (*MEETING, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # a stage refuses the modules that other tests have loaded into this process
    monkeypatch.setattr(front.stages, "watched", lambda *arguments, **options: nullcontext())


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_variable_is_refused_by_name(case: str, monkeypatch: pytest.MonkeyPatch):
    variables, reported = WRONG[case]
    set_all(monkeypatch, variables)
    with pytest.raises(UserError) as refused:
        rank_and_size()
    assert str(refused.value).startswith(reported) and "start the ranks with torchrun or --ranks" in str(refused.value)


def test_right_variables_are_taken(monkeypatch: pytest.MonkeyPatch):
    assert (rank_and_size(), number("LOCAL_RANK", 0)) == ((0, 1), 0)
    set_all(monkeypatch, MEETING)
    assert rank_and_size() == (1, 2)


def test_failure_is_told_whatever_stands_in_local_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for text, reported in {"x": "a\n", "": "a\n", "0": "a\n", "1": ""}.items():
        monkeypatch.setenv("LOCAL_RANK", text)
        UserError("a").report()
        assert capsys.readouterr().err == reported


@pytest.mark.parametrize(
    ("spoken", "reported"),
    [
        (["0 a", "1 a", "2 a"], "a\n"),
        (["1 a", "2 a", "0 a"], "a\n"),
        (["1 another rank has failed", "0 why", "2 why"], "another rank has failed\nwhy\n"),
    ],
)
def test_first_rank_of_a_host_that_ends_speaks_for_all(
    spoken: list[str],
    reported: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(errors, "PATIENCE", 0.0)
    for text in spoken:
        rank, _, message = text.partition(" ")
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        UserError(message).report()
    assert capsys.readouterr().err == reported


@pytest.mark.parametrize("place", ["missing/1/error.json", "file/1/error.json"])
def test_rank_that_can_note_nothing_speaks(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(errors, "PATIENCE", 0.0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / place))
    UserError("a").report()
    assert capsys.readouterr().err == "a\n"


def met(error: OSError, config: Config, out: Path) -> int:
    """The exit code of a stage that meets an error of the system."""

    def stage(config: Config, out: Path) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        front.call(OURS, stage, config, out)
    return int(str(ended.value.code))


def test_place_that_cannot_be_had_ends_a_stage_in_a_line(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = str(tmp_path / "evaluation.json")
    for reason, code, reported in (
        (errno.EROFS, 2, f"{path}: Read-only file system: the file system is read-only; name another place\n"),
        (errno.EACCES, 2, f"{path}: Permission denied: change its mode so that you may read and write it, or "),
        (errno.ENOENT, 2, f"{path}: No such file or directory: restore it, or name another place\n"),
        (errno.ENOTDIR, 2, f"{path}: Not a directory: a folder is wanted where a file is; name another place\n"),
        (errno.ENOSPC, 1, "[Errno 28] No space left on device"),
    ):
        assert met(OSError(reason, os.strerror(reason), path), config, tmp_path) == code
        said = capsys.readouterr().err
        assert said.startswith(reported) and len(said.splitlines()) == 1


def test_error_that_no_place_explains_keeps_its_traceback(config: Config, tmp_path: Path):
    assert of_system(OSError(errno.EBADF, "Bad file descriptor")) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        met(OSError(errno.EBADF, "Bad file descriptor"), config, tmp_path)
