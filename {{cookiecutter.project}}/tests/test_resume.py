"""Killed and resumed, on any world size, a run ends with the bits of the run that was never killed."""

import hashlib
import json
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT
from project import train as train_module
from project.config import Config
from project.repro import checkpoint
from project.repro import record as record_module
from project.repro import run as run_module
from project.repro.errors import Failure
from project.repro.files import read_json, write_json
from project.repro.record import Record
from project.repro.run import Run
from victim import Victim

STEPS = 23  # of one epoch
EVERY_STEP = "checkpoint.every=1", "checkpoint.keep=2"

Start = Callable[..., Victim]


@pytest.fixture
def start(tmp_path: Path, prepared: Path):
    """A function that starts training for one epoch in the run directory `run`; what is left is killed."""
    victims = []

    def start(*settings: str, ranks: int | None = None, restarts: int = 0) -> Victim:
        settings = ("train.epochs=1", f"data.prepared={prepared}", "tracking.enabled=false", *settings)
        arguments = [text for setting in settings for text in ("--set", setting)]
        victims.append(Victim(PROJECT, tmp_path / "run", *arguments, ranks=ranks, restarts=restarts))
        return victims[-1]

    yield start
    for victim in victims:
        victim.kill()


def result(out: Path) -> dict[str, Any]:
    """All that must not depend on kills, resumes and world sizes."""
    last = checkpoint.found(out / checkpoint.FOLDER)[-1]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "optimizer": hashlib.sha256((last / "optimizer.safetensors").read_bytes()).hexdigest(),
        "last checkpoint": last.name,
        "rows": [(row["step"], row["metrics"]) for row in rows],
        "status": read_json(out / "run.json")["status"],
    }


def inside(config: Config, prepared: Path, workers: int = 1, **checkpoints: Any) -> Config:
    """The settings of `start`, for a training inside this process.

    With a loader worker: without one, each sample seeds this process's generator, which could hide a missing seed.
    """
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"prepared": str(prepared)}),
            "train": config.train.model_copy(update={"epochs": 1}),
            "tracking": config.tracking.model_copy(update={"enabled": False}),
            "loader": config.loader.model_copy(update={"workers": workers}),
            "checkpoint": config.checkpoint.model_copy(update=checkpoints),
        }
    )


@pytest.fixture(scope="module")
def whole(config: Config, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run gives that nobody interrupts: one process."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_module.train(inside(config, prepared), out)
    seen = result(out)
    assert [step for step, _ in seen["rows"]] == [*range(STEPS), STEPS - 1] and seen["status"] == "FINISHED"
    return seen


class Crash(BaseException):
    """Stands for the end of the process: nothing that handles errors may run after it."""


Finish = Callable[..., None]


@pytest.fixture
def finish(config: Config, prepared: Path, whole: dict[str, Any], tmp_path: Path) -> Finish:
    """A function that goes on with the run in this process, to the result that it must have."""

    def finish(workers: int = 1, **checkpoints: Any) -> None:
        train_module.train(inside(config, prepared, workers, **checkpoints), tmp_path / "run")
        assert result(tmp_path / "run") == whole

    return finish


# ---- SIGKILL


def test_killed_again_and_again_on_changing_world_sizes(start: Start, whole: dict[str, Any]):
    """Four processes, one, three; every second time while a checkpoint is being written."""
    dice = random.Random(3)
    for ranks in (4, None, 3):
        victim = start(*EVERY_STEP, ranks=ranks)
        rows = dice.randint(2, 5)
        assert victim.until(lambda v=victim, n=rows: v.news() >= n), victim.log.read_text()
        if ranks != 4:
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


def test_tracked_and_killed_is_one_run_with_each_step_once(
    start: Start, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    tracked = "tracking.enabled=true", "tracking.wait_seconds=120"

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
    third = start(*tracked)
    assert third.end() == 0, third.log.read_text()
    assert result(third.out) == whole

    assert query(tmp_path / "runs.db", "SELECT status FROM runs") == [("FINISHED",)]
    wanted = sorted((key, step, value) for step, metrics in whole["rows"] for key, value in metrics.items())
    assert sorted(rows()) == wanted
    assert set(Counter(row[:2] for row in rows()).values()) == {1}


def query(database: Path, text: str) -> list[tuple[Any, ...]]:
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as store:
            return store.execute(text).fetchall()
    except sqlite3.OperationalError:
        return []  # not made yet


# ---- SIGTERM


def test_sigterm_saves_that_very_step_and_ends_with_143(
    start: Start, finish: Finish, capsys: pytest.CaptureFixture[str]
):
    victim = start("checkpoint.every=1000")
    assert victim.until(lambda: victim.rows() >= 5)
    victim.process.send_signal(signal.SIGTERM)
    assert victim.end() == 143
    done = victim.rows()
    assert 5 <= done < STEPS
    (saved,) = victim.checkpoints()
    assert int(saved.name[:9]) == done
    assert victim.log.read_text().splitlines()[-1].startswith(f"stopped by SIGTERM after step {done}; ")
    assert "Traceback" not in victim.log.read_text()
    assert read_json(victim.out / "run.json")["status"] == "KILLED"
    finish(workers=0, every=7)
    assert f"after step {done}\n" in capsys.readouterr().out


def test_sigterm_to_torchrun_saves_too(start: Start, finish: Finish):
    victim = start("checkpoint.every=1000", ranks=2)
    assert victim.until(lambda: victim.rows() >= 5)
    victim.process.send_signal(signal.SIGTERM)
    assert victim.end() != 0
    (saved,) = victim.checkpoints()
    assert int(saved.name[:9]) == victim.rows()
    finish()


# ---- one rank lost


def test_torchrun_starts_again_by_itself_when_a_rank_is_killed(start: Start, whole: dict[str, Any]):
    victim = start(*EVERY_STEP, ranks=3, restarts=2)
    assert victim.until(lambda: victim.rows() >= 4)
    (lost,) = [pid for pid in victim.pids() if b"\0RANK=2\0" in environment(pid)]
    os.kill(lost, signal.SIGKILL)
    assert victim.end() == 0, victim.log.read_text()
    assert result(victim.out) == whole
    assert "resumed " in victim.log.read_text()


def environment(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


# ---- what may change between attempts, and what may not


@pytest.fixture
def interrupted(config: Config, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of `start`, as a crash after step 12 leaves it: made in this process."""

    def crash(step: int, model: Any, optimizer: Any) -> checkpoint.Snapshot:
        if step > 12:
            raise Crash
        return taken(step, model, optimizer)

    taken = checkpoint.take
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(checkpoint, "take", crash)
        train_module.train(inside(config, prepared, every=3, keep=2), tmp_path / "run")
    write_json(tmp_path / "run" / "run.json", read_json(tmp_path / "run" / "run.json") | {"status": "RUNNING"})
    assert [int(p.name[:9]) for p in checkpoint.found(tmp_path / "run" / "checkpoints")] == [9, 12]
    return tmp_path / "run"


def test_resumed_goes_on_where_the_newest_checkpoint_ends(
    finish: Finish, interrupted: Path, capsys: pytest.CaptureFixture[str]
):
    finish()
    assert "after step 12\n" in capsys.readouterr().out


def test_another_content_address_is_refused_naming_key_and_values(start: Start, interrupted: Path):
    before = sorted((path, path.stat().st_mtime_ns) for path in interrupted.rglob("*"))
    victim = start("train.learning_rate=0.5")
    assert victim.end() == 2
    (line,) = victim.log.read_text().splitlines()
    assert "config.train.learning_rate: 0.004 there, 0.5 here" in line
    assert line.count(" there, ") == 1
    assert sorted((path, path.stat().st_mtime_ns) for path in interrupted.rglob("*")) == before


def test_going_on_in_another_environment_is_told_and_marks_the_record(
    finish: Finish, interrupted: Path, capsys: pytest.CaptureFixture[str]
):
    path = interrupted / "environment.json"
    there = read_json(path)
    write_json(path, there | {"class": "cpu/other", "preimage": there["preimage"] | {"numpy": "1.0"}})
    finish()
    assert "another numeric environment, its bits are not promised. numpy: 1.0 there" in capsys.readouterr().err
    assert read_json(path)["class"].startswith("mixed/")


def test_damaged_checkpoint_is_skipped_without_a_trace_in_the_result(
    finish: Finish, interrupted: Path, capsys: pytest.CaptureFixture[str]
):
    newest = checkpoint.found(interrupted / "checkpoints")[-1]
    content = bytearray((newest / "optimizer.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "optimizer.safetensors").write_bytes(content)
    finish()
    told = capsys.readouterr()
    assert "after step 9\n" in told.out and newest.name in told.err


def test_with_all_checkpoints_damaged_it_starts_anew(finish: Finish, interrupted: Path):
    for path in checkpoint.found(interrupted / "checkpoints"):
        (path / "state.json").write_text("{}")
    finish()


def test_row_torn_by_the_crash_is_written_anew(finish: Finish, interrupted: Path):
    path = interrupted / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 20)
    finish()


def test_finished_run_started_again_is_a_new_run(finish: Finish, interrupted: Path):
    finish()
    first = read_json(interrupted / "run.json")["id"]
    assert checkpoint.found(interrupted / "checkpoints")
    finish(every=1000)
    assert read_json(interrupted / "run.json")["id"] != first
    assert [int(path.name[:9]) for path in checkpoint.found(interrupted / "checkpoints")] == [STEPS]


@pytest.mark.parametrize("off", [-1, 1])
def test_resuming_at_the_wrong_step_is_caught_at_once(
    off: int, finish: Finish, interrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run comes by recorded steps again, and their numbers differ."""
    read = checkpoint.read

    def shifted(path: Path) -> checkpoint.Snapshot:
        there = read(path)
        return checkpoint.Snapshot(there.step + off, there.model, there.optimizer, there.values)

    monkeypatch.setattr(checkpoint, "read", shifted)
    with pytest.raises(Failure, match=rf"step {12 + off}: .* before the interruption .* not the same run"):
        finish()


def test_wrong_state_is_caught_where_steps_are_run_again(
    finish: Finish, interrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    """Other weights, in a checkpoint that is valid."""
    (newest, older) = (checkpoint.found(interrupted / "checkpoints")[i] for i in (-1, -2))
    newest.rename(newest.with_name("damaged-for-the-test"))
    wrong = checkpoint.read(older)
    wrong.model["head.bias"][0] += 0.5
    for path in checkpoint.found(interrupted / "checkpoints"):
        path.rename(path.with_name(f"damaged-{path.name}"))
    checkpoint.write(wrong, interrupted / "checkpoints", "", keep=1)
    with pytest.raises(Failure, match="step 9: loss was"):
        finish()


def test_record_compares_what_is_logged_again(tmp_path: Path):
    record = Record(tmp_path)
    record.begin(tags={})
    record.log(0, {"loss": 0.1, "odd": float("nan")})
    resumed = Record(tmp_path)
    resumed.resume()
    resumed.log(0, {"loss": 0.1, "odd": float("nan")})
    with pytest.raises(Failure, match=r"step 0: loss was 0\.1 .* 0\.10000000000000002 now"):
        resumed.log(0, {"loss": 0.10000000000000002})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_killed_after_the_last_step_only_the_end_is_made_again(
    finish: Finish, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def crash(*arguments: Any, **options: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Run, "finish", crash)
        finish()
    finish()
    assert f"after step {STEPS}\n" in capsys.readouterr().out


def test_killed_while_starting_it_starts_again(
    config: Config, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Over a finished run of another content address, at each of the small files that a start writes."""
    other = config.model_copy(update={"seed": 1})
    crashes = 0
    for instant in range(3):
        with Run(inside(other, prepared), tmp_path):
            pass
        count = iter(range(100))

        def write(path: Path, value: Any, at: int = instant, count: Iterator[int] = count) -> None:
            if next(count) == at:
                raise Crash
            write_json(path, value)

        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(run_module, "write_json", write)
            patch.setattr(record_module, "write_json", write)
            with Run(inside(config, prepared), tmp_path):
                raise AssertionError("it writes less than that")
        crashes += 1
        with Run(inside(config, prepared), tmp_path) as run:
            assert read_json(tmp_path / "address.json")["address"] == run.address.digest
    assert crashes == 3


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_checkpoint_that_cannot_be_written_stops_the_run_or_not(
    on_error: str,
    config: Config,
    prepared: Path,
    tmp_path: Path,
    whole: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write, out = checkpoint.write, tmp_path / "run"

    def full(snapshot: checkpoint.Snapshot, *rest: Any) -> Path:
        if 4 < snapshot.step < 20:
            raise OSError(28, "No space left on device")
        return write(snapshot, *rest)

    def train() -> None:
        train_module.train(inside(config, prepared, every=4, on_error=on_error), out)

    monkeypatch.setattr(checkpoint, "write", full)
    if on_error == "stop":
        with pytest.raises(Failure, match=r"no checkpoint was written: .*No space left on device"):
            train()
        rows = len((out / "metrics.jsonl").read_text().splitlines())
        assert 8 <= rows < 12, "known at the next step, not at the next checkpoint"
        assert [int(path.name[:9]) for path in checkpoint.found(out / "checkpoints")] == [4]
        monkeypatch.setattr(checkpoint, "write", write)
    train()
    assert result(out) == whole
    assert capsys.readouterr().err.count("No space left") == (3 if on_error == "continue" else 1)
