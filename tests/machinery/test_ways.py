"""`repro verify` tries the ways that one asks for, and kills a training that is quick."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import PACKAGE, python
from project import PROJECT
from project.config import Config
from project.repro.analysis import verify
from project.repro.analysis.verify import WAYS, Way, chosen
from project.repro.cli import Ours, main
from project.repro.core.errors import Failure, Refused
from project.repro.core.ranks import ALONE
from project.repro.core.shards import Scattered, Shard
from project.repro.record import names
from server import until
from warm import PATIENCE


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


# ---- a way that the training refuses

SHARDED = "optimizer sharded on 2 ranks"
REFUSAL = "parallel.shard: Adafactor does not update each element by itself, so use another one"


@pytest.mark.parametrize(
    ("way", "code", "said", "verdict"),
    [
        (SHARDED, 2, ["told before", REFUSAL], f"not tried: {REFUSAL}"),
        (SHARDED, 2, ["\x1b[2Jone" + 80 * " more"], r"not tried: \x1b[2Jone" + 57 * " more" + " …"),
        (SHARDED, 2, [], "not tried: refused without a word"),
        (SHARDED, 1, [REFUSAL], f"FAILED: it ended with 1:\n{REFUSAL}"),
        (SHARDED, -9, [], "FAILED: it ended with -9:"),
        ("2 ranks", 2, [str(line) for line in range(20)], f"FAILED: it ended with 2:\n8\n9\n{'%s'}"),
    ],
)
def test_refusal_of_shards_alone_is_no_failure(
    way: str, code: int, said: list[str], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verify, "FOLDER", tmp_path)
    row = tried(way, code, said)
    assert row.verdict == verdict.replace("%s", "\n".join(str(line) for line in range(10, 20)))
    assert not row.weights


def tried(way: str, code: int, said: list[str]) -> verify.Row:
    """The row of a training that says this and ends with this code."""

    def start(way: Way, settings: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
        way.log.write_text("".join(f"{line}\n" for line in said))
        end = f"import os; os._exit({code})" if code >= 0 else f"import os; os.kill(os.getpid(), {-code})"
        return subprocess.Popen([sys.executable, "-c", end])

    return verify._train(PROJECT, *chosen([way]), {}, start)


def test_refusal_of_torchs_clip_is_shown_as_one_sentence_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = Scattered(Shard(torch.ones(4), (0, 4), weight.shape, ALONE))
    with pytest.raises(Refused) as refused:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    monkeypatch.setattr(verify, "FOLDER", tmp_path)
    verdict = tried(SHARDED, 2, [str(refused.value)]).verdict
    assert verdict.startswith("not tried: linalg_vector_norm cannot take a gradient that is sharded over the ranks: ")
    assert "call clip_grad_norm_ of repro/core/exact.py" in verdict and verdict.endswith(" parallel.shard=none")


@pytest.mark.parametrize(
    ("verdicts", "told", "code"),
    [
        (["EQUAL", "EQUAL", "not tried: it refuses"], "EQUAL: 2 of 2 trainings", 0),
        (["EQUAL", "not tried: it refuses"], "NOT COMPARED: 1 of 1 trainings", 1),
        (["EQUAL", "DIFFERS", "not tried: it refuses"], "DIFFERS: 1 of 2 trainings", 1),
        (["FAILED: so"], "DIFFERS: 0 of 1 trainings", 1),
    ],
)
def test_way_that_is_not_tried_counts_for_nothing(
    verdicts: list[str], told: str, code: int, monkeypatch: pytest.MonkeyPatch
):
    rows = [verify.Row(f"way {number}", verdict) for number, verdict in enumerate(verdicts)]
    monkeypatch.setattr(verify, "train_in_all_ways", lambda *given: iter(rows))
    monkeypatch.chdir(PROJECT.root)
    done = CliRunner().invoke(main, ["verify", "--ranks", "1"], obj=Ours(PROJECT, Config))
    assert (done.output.splitlines()[-1], done.exit_code) == (told, code), done


# ---- the kill: a training in place of which a script runs, which makes checkpoints and then ends or waits


def test_kills_lie_before_and_behind_an_epochs_end_and_in_the_last_third():
    kills = {way.name: way.instant(45, 2.004) for way in WAYS if way.ended}
    assert kills == {
        "killed and resumed": 34,
        "killed and resumed on 2 ranks": 23,
        "stopped by SIGTERM and resumed": 15,
    }
    assert [verify.behind_an_epoch(*length) for length in ((23, 1.02), (12, 0.3), (90, 4.0))] == [11, 6, 23]


Started = tuple[list[int], Callable[[], "subprocess.Popen[bytes]"]]
Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A function that has trainings end by themselves, one after another with these codes, the last one never."""

    def start(*codes: int) -> Started:
        started: list[int] = []

        def training() -> "subprocess.Popen[bytes]":
            code = codes[len(started)] if len(started) < len(codes) else None
            text = f"import os, sys, time; os.makedirs({str(tmp_path / 'run' / names.CHECKPOINTS)!r}); "
            made = "[os.makedirs(f'run/checkpoints/{step:09d}-0') for step in (6, 18, 12)]; time.sleep(3600)"
            text += f"os.chdir({str(tmp_path)!r}); {made}" if code is None else f"sys.exit({code})"
            started.append(0 if code is None else 1)
            return subprocess.Popen([sys.executable, "-c", text], start_new_session=True)

        return started, training

    return start


@pytest.mark.parametrize("quick", range(3))
def test_training_that_is_too_quick_for_a_kill_is_started_again(start: Start, quick: int, tmp_path: Path):
    started, training = start(*[0] * quick)
    verify._kill(training, tmp_path / "run", 12, signal.SIGKILL)
    assert started == [1] * quick + [0]
    assert (tmp_path / "run" / names.CHECKPOINTS).is_dir()


def test_training_that_is_killed_late_goes_on_from_the_step_that_was_wanted(start: Start, tmp_path: Path):
    folder = tmp_path / "run" / names.CHECKPOINTS
    for by in (signal.SIGTERM, signal.SIGKILL):
        _, training = start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "PAUSE", 0.01)
            verify._kill(training, tmp_path / "run", 12, by)
        steps = [step for step, _ in verify._checkpoints(tmp_path / "run")]
        assert folder.is_dir() and (by == signal.SIGTERM or max(steps) <= 12)


def test_training_that_is_always_too_quick_is_told(start: Start, tmp_path: Path):
    started, training = start(0, 0, 0)
    with pytest.raises(Failure, match=r"ended before it was killed: make it longer, see verify\.shorten"):
        verify._kill(training, tmp_path / "run", 12, signal.SIGKILL)
    assert len(started) == 3


def test_training_that_fails_is_not_started_again_to_be_killed(start: Start, tmp_path: Path):
    """The next start, without a kill, says why it fails."""
    started, training = start(3)
    verify._kill(training, tmp_path / "run", 12, signal.SIGKILL)
    assert len(started) == 1


# ---- who interrupts a verification

INTERRUPTED = """
import sys, time
from pathlib import Path
from {package} import PROJECT
from {package}.repro.start import trainings
from {package}.repro.analysis import verify
from {package}.repro.analysis.verify import ONCE, chosen

def start(way, settings):
    code = "import os, time; os.write(1, str(os.getpid()).encode()); time.sleep(3600)"
    return trainings.start(PROJECT, [sys.executable, "-c", code], Path(sys.argv[1]))

verify.FOLDER = Path(sys.argv[1]).parent
verify._train(PROJECT, *chosen([sys.argv[2]]), {}, start, 20)
"""


@pytest.mark.parametrize("way", ["once more", "killed and resumed"])
def test_interruption_ends_the_training_too(way: str, tmp_path: Path):
    """Which does not get Ctrl-C itself."""
    log = tmp_path / "log"
    log.touch()
    words = [sys.executable, "-c", INTERRUPTED.replace("{package}", PACKAGE), str(log), way]
    lab = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    pid = int(until(log.read_text))
    lab.send_signal(signal.SIGINT)
    assert lab.wait(PATIENCE) != 0
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: not stat.exists() or ") Z " in stat.read_text())
