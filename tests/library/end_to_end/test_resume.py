"""Killed and resumed, on any world size, a run ends with the bits of the run that was never killed."""

import os
import random
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from attempt import STEPS, Finish, result
from victim import Start
from warm import PATIENCE

from samebits.base.files import read_json

EVERY_STEP = "checkpoint.every=1", "checkpoint.keep=2"

# ---- SIGKILL


@pytest.mark.long
def test_killed_again_and_again_on_changing_world_sizes(start: Start, whole: dict[str, Any]):
    """Three processes that hold shards, one, two; most times while a checkpoint is being written."""
    dice = random.Random(3)
    for ranks, shard in ((3, "full"), (None, "none"), (2, "optimizer")):
        victim = start(*EVERY_STEP, f"parallel.shard={shard}", ranks=ranks)
        rows = dice.randint(2, 5)
        assert victim.until(lambda v=victim, n=rows: v.news() >= n), victim.log.read_text()
        if ranks != 3:
            assert victim.until(victim.writing), victim.log.read_text()
        victim.kill()
        assert 0 < victim.rows() < STEPS, "killed too late to prove anything"
    victim = start(*EVERY_STEP)
    assert victim.end() == 0, victim.log.read_text()
    assert result(victim.out) == whole
    assert victim.log.read_text().count("resumed ") == 3


def test_killed_while_writing_the_first_checkpoint(start: Start, finish: Finish):
    victim = start(*EVERY_STEP)
    assert victim.until(victim.writing), victim.log.read_text()
    victim.kill()
    finish(every=5)


@pytest.mark.long
def test_tracked_and_killed_is_one_run_with_each_step_once(
    start: Start, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path / "mlruns"))  # else it lies in the project
    tracked = "tracking.enabled=true", "tracking.wait_seconds=900"

    def rows() -> list[tuple[Any, ...]]:
        return query(tmp_path / "runs.db", "SELECT key, step, value FROM metrics")

    first = start(*tracked, *EVERY_STEP)
    assert first.until(lambda: first.rows() >= 4)
    first.process.send_signal(signal.SIGSTOP)  # while the upload, which is slow to start, comes so far
    assert first.until(lambda: len(rows()) >= 12), "nothing was uploaded"
    first.kill()
    second = start(*tracked, *EVERY_STEP, ranks=2)
    assert second.until(lambda: second.news() >= 3)
    second.kill(follower=False)  # it finds its training gone
    assert second.rows() < STEPS, "killed too late to prove anything"
    third = start(*tracked)
    assert third.end() == 0, third.log.read_text()
    assert result(third.out) == whole

    assert query(tmp_path / "runs.db", "SELECT status FROM runs") == [("FINISHED",)]
    wanted = sorted((key, step, value) for step, metrics in whole["rows"] for key, value in metrics.items())
    assert sorted(rows()) == wanted
    assert set(Counter(row[:2] for row in rows()).values()) == {1}


def query(database: Path, text: str) -> list[tuple[Any, ...]]:
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=PATIENCE)) as store:
            return store.execute(text).fetchall()
    except sqlite3.OperationalError:
        return []  # not made yet


# ---- SIGTERM


@pytest.mark.parametrize(("workers", "ranks"), [(0, None), (2, None), (2, 2)])
def test_sigterm_saves_that_very_step_and_ends_with_143(
    workers: int, ranks: int | None, start: Start, finish: Finish, capsys: pytest.CaptureFixture[str]
):
    """Also one to all processes, as Slurm sends it: the loader's workers do not end before the state is saved."""
    victim = start("checkpoint.every=1000", f"loader.workers={workers}", ranks=ranks)
    assert victim.until(lambda: victim.rows() >= 5)
    victim.process.send_signal(signal.SIGTERM, group=workers > 0)
    assert victim.end() == (1 if ranks else 143), victim.log.read_text()  # as torchrun's
    (saved,) = victim.checkpoints()
    done = int(saved.name[:9])
    assert 5 <= done < STEPS and victim.rows() in (done, done + 1)  # without one more step on a machine that is slow
    assert victim.log.read_text().splitlines()[-1].startswith(f"stopped by SIGTERM after step {done}; ")
    assert "Traceback" not in victim.log.read_text()
    assert read_json(victim.out / "run.json")["status"] == "KILLED"
    finish(workers=0, every=7)
    assert f"after step {done}\n" in capsys.readouterr().out


@pytest.mark.long
def test_torchrun_that_is_killed_takes_its_ranks_along_and_they_save(start: Start, finish: Finish):
    victim = start("checkpoint.every=1000", ranks=2, restarts=0)
    assert victim.until(lambda: victim.rows() >= 5)
    victim.process.send_signal(signal.SIGKILL)
    assert victim.end() != 0
    victim.wait_for_ranks()
    assert victim.rows() < STEPS
    (saved,) = victim.checkpoints()
    assert victim.rows() - int(saved.name[:9]) in (0, 1)
    finish()


# ---- one rank lost


@pytest.mark.long
def test_torchrun_starts_again_by_itself_when_a_rank_is_killed(start: Start, whole: dict[str, Any]):
    victim = start(*EVERY_STEP, ranks=2, restarts=2)
    assert victim.until(lambda: victim.rows() >= 4)
    (lost,) = [pid for pid in victim.pids() if b"\0RANK=1\0" in environment(pid)]
    os.kill(lost, signal.SIGKILL)
    assert victim.end() == 0, victim.log.read_text()
    assert result(victim.out) == whole
    assert "resumed " in victim.log.read_text()


def environment(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
