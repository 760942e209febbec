"""`repro verify` tries the ways that one asks for, and kills a training that is quick."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PACKAGE, python
from project import PROJECT
from project.repro.errors import Failure, Refused
from project.repro.lab import trainings, verify
from project.repro.lab.verify import WAYS, chosen
from project.repro.records import names


def test_all_ways_are_tried_unless_some_are_named():
    assert list(chosen([])) == list(WAYS)
    assert [way.name for way in chosen(["killed and resumed", "once more"])] == ["once more", "killed and resumed"]


def test_unknown_way_is_refused_with_those_that_are_known():
    with pytest.raises(Refused, match=r"^--only 'twice': no such way to train; known: once more; 1 loader worker;"):
        chosen(["once more", "twice"])
    done = python("-m", PACKAGE, "verify", "--only", "twice")
    assert done.returncode == 2 and done.stderr.startswith("--only 'twice': ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("verify.vary=[train.epoch=1]", "params.yaml: verify.vary does not fit: --set train.epoch: unknown key; "),
        ("verify.vary=[seed=1]", "params.yaml: verify.vary: seed is not neutral, so it asks for another run; leave"),
        ("verify.vary=[train.shift=2]", "params.yaml: verify.vary: train.shift is not neutral, so it asks for "),
        ("verify.vary=[device=cpu]", "params.yaml: verify.vary: device is not neutral, so it asks for another run"),
    ],
)
def test_varied_key_that_is_not_neutral_is_refused_by_name(override: str, told: str):
    done = python("-m", PACKAGE, "verify", "--set", override)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(told), done.stderr


def test_shortening_that_does_not_fit_the_config_is_refused_by_name():
    done = python("-m", PACKAGE, "verify", "--set", "verify.shorten=[train.epoch=1]")
    told = "params.yaml: verify.shorten does not fit: --set train.epoch: unknown key; did you mean train.epochs?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


# ---- the kill: a training in place of which a script runs, which writes rows and then ends or waits

Start = Callable[..., list[int]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A function that has trainings end by themselves, one after another with these codes, the last one never."""

    def start(*codes: int) -> list[int]:
        started: list[int] = []

        def training(project: object, words: list[str]) -> "subprocess.Popen[bytes]":
            code = codes[len(started)] if len(started) < len(codes) else None
            rows = tmp_path / "run" / names.STEP_ROWS
            text = f"import pathlib, sys, time; rows = pathlib.Path({str(rows)!r}); rows.parent.mkdir(parents=True); "
            text += "rows.write_bytes(bytes(10**5)); time.sleep(3600)" if code is None else f"sys.exit({code})"
            started.append(0 if code is None else 1)
            return subprocess.Popen([sys.executable, "-c", text], start_new_session=True)

        monkeypatch.setattr(trainings, "start", training)
        return started

    return start


@pytest.mark.parametrize("quick", range(3))
def test_training_that_is_too_quick_for_a_kill_is_started_again(start: Start, quick: int, tmp_path: Path):
    started = start(*[0] * quick)
    verify._kill(PROJECT, [], tmp_path / "run", 12, signal.SIGKILL)
    assert started == [1] * quick + [0]
    assert (tmp_path / "run" / names.STEP_ROWS).is_file()


def test_training_that_is_always_too_quick_is_told(start: Start, tmp_path: Path):
    started = start(0, 0, 0)
    with pytest.raises(Failure, match=r"ended before it was killed: make it longer, see verify\.shorten"):
        verify._kill(PROJECT, [], tmp_path / "run", 12, signal.SIGKILL)
    assert len(started) == 3


def test_training_that_fails_is_not_started_again_to_be_killed(start: Start, tmp_path: Path):
    """The next start, without a kill, says why it fails."""
    started = start(3)
    verify._kill(PROJECT, [], tmp_path / "run", 12, signal.SIGKILL)
    assert len(started) == 1
