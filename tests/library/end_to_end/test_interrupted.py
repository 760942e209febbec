"""Between two attempts at a run: what may change, what is refused, and what leaves no trace in the result."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempt import STEPS, Crash, Finish, crash_after, inside, origin, result
from project import train
from project.config import Config
from support import OURS, train_here

from samebits.address.address import digest
from samebits.base.files import read_json, write_json
from samebits.checkpoint import checkpoint
from samebits.config.settings import Record as Fate
from samebits.core.errors import RunError, UserError
from samebits.core.shards import unsharded
from samebits.core.state import Snapshot
from samebits.core.step import Step
from samebits.front import STAGES
from samebits.record import names
from samebits.record import opening as opening_module
from samebits.record import record as record_module
from samebits.record.classes import environments
from samebits.record.receipt import read
from samebits.record.record import Record
from samebits.run import Run


@pytest.fixture(scope="module")
def crashed(config: Config, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as a crash after step 12 leaves it: made in this process."""
    out = tmp_path_factory.mktemp("crashed") / "run"
    with crash_after(12):
        train_here(inside(config, prepared, every=3, keep=2), out)
    write_json(out / "run.json", read_json(out / "run.json") | {"status": "RUNNING"})
    assert [int(p.name[:9]) for p in checkpoint.found(out / "checkpoints")] == [9, 12]
    return out


@pytest.fixture
def interrupted(crashed: Path, tmp_path: Path) -> Path:
    """The run directory of `finish`: a copy of it, to plant faults in."""
    return Path(shutil.copytree(crashed, tmp_path / "run"))


def test_resumed_goes_on_where_the_newest_checkpoint_ends_and_writes_a_torn_row_anew(
    finish: Finish, interrupted: Path, capsys: pytest.CaptureFixture[str]
):
    path = interrupted / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 20)
    finish()
    assert "after step 12\n" in capsys.readouterr().out


def test_another_content_address_is_refused_naming_key_and_values(config: Config, prepared: Path, interrupted: Path):
    before = sorted((path, path.stat().st_mtime_ns) for path in interrupted.rglob("*"))
    another = inside(config, prepared)
    another = another.model_copy(update={"train": another.train.model_copy(update={"learning_rate": 0.5})})
    with pytest.raises(UserError) as refused:
        train_here(another, interrupted)
    assert "config.train.learning_rate: 0.004 there, 0.5 here" in str(refused.value)
    assert str(refused.value).count(" there, ") == 1 and "\n" not in str(refused.value)
    assert sorted((path, path.stat().st_mtime_ns) for path in interrupted.rglob("*")) == before


def test_going_on_in_another_environment_is_told_and_marks_the_record(
    finish: Finish, interrupted: Path, capsys: pytest.CaptureFixture[str]
):
    path = interrupted / "environment.json"
    there = read_json(path)
    write_json(path, there | {"preimage": there["preimage"] | {"threads": 2}})
    finish()
    assert "another numeric environment: equal bits are not guaranteed. threads: 2 there" in capsys.readouterr().err
    here = read_json(path)
    assert here["class"].startswith("mixed/") and [each["threads"] for each in here["before"]] == [2]
    assert environments(here) == (digest(here["before"][0]), there["environment"])
    assert read(interrupted).stated["environment"].items() <= here.items()


def test_damaged_checkpoint_is_skipped_without_a_trace_in_the_result(
    finish: Finish, interrupted: Path, capsys: pytest.CaptureFixture[str]
):
    newest = checkpoint.found(interrupted / "checkpoints")[-1]
    content = bytearray((newest / "optimizer.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "optimizer.safetensors").write_bytes(content)
    finish()
    message = capsys.readouterr()
    assert "after step 9\n" in message.out and newest.name in message.err


def test_with_all_checkpoints_damaged_it_starts_anew(finish: Finish, interrupted: Path):
    for path in checkpoint.found(interrupted / "checkpoints"):
        (path / "state.json").write_text("{}")
    finish()


@pytest.mark.long
def test_finished_run_started_again_is_a_new_run(
    finish: Finish, interrupted: Path, config: Config, prepared: Path, tmp_path: Path
):
    finish()
    first = read_json(interrupted / "run.json")["id"]
    (newest, *_) = checkpoint.found(interrupted / "checkpoints")
    replaced = shutil.copytree(interrupted, interrupted / names.EARLIER / f"{names.REPLACED}by-this")
    for name in (names.TENSOR_ROWS, names.TENSOR_COLUMNS, names.VALUES, names.rank_values(11), names.rank_rows(11)):
        (replaced / name).touch()
    (replaced / "checkpoints" / newest.name / "model-00001.safetensors").touch()
    again = inside(config, prepared, every=1000)
    train_here(again.model_copy(update={"record": Fate(finished="replace")}), interrupted)
    assert not (interrupted / names.EARLIER).exists()  # a run knows all names that it gives
    assert read_json(interrupted / "run.json")["id"] != first
    assert [int(path.name[:9]) for path in checkpoint.found(interrupted / "checkpoints")] == [STEPS]


@pytest.mark.parametrize("off", [-1, 1])
def test_resuming_at_the_wrong_step_is_caught_at_once(
    off: int, finish: Finish, interrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run comes by recorded steps again, and their numbers differ."""
    read = checkpoint.read

    def shifted(*arguments: Any) -> Snapshot:
        there = read(*arguments)
        return dataclasses.replace(there, step=there.step + off)

    monkeypatch.setattr(checkpoint, "read", shifted)
    with pytest.raises(
        RunError, match=rf"step {12 + off}, made again: .* before the interruption: .* not the same run"
    ):
        finish()


@pytest.mark.long
def test_wrong_state_is_caught_where_steps_are_run_again(
    finish: Finish, interrupted: Path, monkeypatch: pytest.MonkeyPatch
):
    """Other weights, in a checkpoint that is valid."""
    (newest, older) = (checkpoint.found(interrupted / "checkpoints")[i] for i in (-1, -2))
    newest.rename(newest.with_name("damaged-for-the-test"))
    wrong = dataclasses.replace(checkpoint.read(older, origin(interrupted)).changed(unsharded), digests={})
    wrong.model["head.bias"][0] += 0.5
    for path in checkpoint.found(interrupted / "checkpoints"):
        path.rename(path.with_name(f"damaged-{path.name}"))
    checkpoint.write(wrong, interrupted / "checkpoints", origin(interrupted), keep=1)
    with pytest.raises(RunError, match="step 9, made again: loss has other bits than before"):
        finish()


def test_checkpoint_of_another_run_is_never_used(finish: Finish, interrupted: Path, tmp_path: Path):
    """As where `checkpoints` was copied, or a link: whole, newest, of the same network, and not this run's."""
    folder, ours = interrupted / "checkpoints", origin(interrupted)
    state = checkpoint.read(checkpoint.found(folder)[-1], ours)
    newer = dataclasses.replace(state, step=state.step + 1)
    for part in ("address", "environment"):
        foreign = checkpoint.write(newer, folder, dataclasses.replace(ours, **{part: "f" * 64}), keep=3)
        with pytest.raises(UserError, match=f"{foreign.name}: made by another run: {part} ffffffffffffffff seen, "):
            finish()
        assert foreign.is_dir()  # nothing is removed that is another's
        shutil.move(foreign, tmp_path)
    finish()


def test_record_compares_what_is_logged_again(tmp_path: Path):
    record = Record(tmp_path)
    empty = {"config": {}, "tracking": {"uri": "", "experiment": ""}, "dataset": {"name": "", "digest": ""}}
    code, tags = {"commit": None, "patch": None}, {"repro.address": "a"}
    record.begin(code=code, tags=tags, **empty)
    record.log(0, {"loss": 0.1, "odd": float("nan")})
    record.log(0, {"loss": 0.2})  # once more in one step, as of the weights that are loaded in the end
    for last in (0.2, 0.20000000000000004):
        resumed = Record(tmp_path)
        resumed.resume()
        resumed.log(0, {"loss": 0.1, "odd": float("nan")})
        assert resumed.log(0, {"loss": last}) == ({"loss": (0.2, last)} if last > 0.2 else {})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_killed_after_the_last_step_only_the_end_is_made_again(
    finish: Finish, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def crash(run: Any, **metrics: Any) -> None:
        run._keeper.finish()  # for the last checkpoint
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Run, "finish", crash)
        finish()
    finish()
    assert f"after step {STEPS}\n" in capsys.readouterr().out


def stopping(run: Run) -> None:
    """The project's own loop, which its owner ends after step 12."""
    log = Step.log

    def stop(step: Step, /, **metrics: Any) -> None:
        log(step, **metrics)
        if step.number == 11:
            run.stop("it is enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "log", stop)
        train.train(run)


def stopped(settings: Config, out: Path) -> dict[str, Any]:
    """The result of a run that its owner ends."""
    STAGES["train"](OURS, stopping)(settings, out)
    return result(out) | {"stopped": read(out).stated["stopped"]}


@pytest.fixture(scope="module")
def ended(config: Config, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What that run gives where nobody interrupts it."""
    return stopped(inside(config, prepared, every=5, keep=2), tmp_path_factory.mktemp("stopped") / "run")


ENDS = "before", *(pytest.param(end, marks=pytest.mark.long) for end in ("in the end", "in the end, and damaged"))


@pytest.mark.parametrize("crash", ENDS)
def test_run_that_its_owner_has_stopped_stays_stopped(
    crash: str,
    ended: dict[str, Any],
    config: Config,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    settings, out = inside(config, prepared, every=5, keep=2), tmp_path / "run"

    def ending(run: Run, **metrics: Any) -> None:
        run._keeper.finish()  # for the last checkpoint
        raise Crash

    assert ended["rows"][-1][0] == 11 and ended["stopped"] == {"reason": "it is enough", "planned": STEPS}
    if crash == "before":
        with crash_after(10):
            stopped(settings, out)
    else:
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(Run, "finish", ending)
            stopped(settings, out)
        assert checkpoint.found(out / "checkpoints")[-1].name.startswith("000000012-")
        if "damaged" in crash:
            (checkpoint.found(out / "checkpoints")[-1] / "state.json").write_text("{}")
    write_json(out / "run.json", read_json(out / "run.json") | {"status": "RUNNING"})
    assert stopped(settings, out) == ended


def opened(run: Run) -> Record:
    """The record of a run, which is written once all fits."""
    assert run._folder
    return run._folder.record


def entered(settings: Config, out: Path) -> str:
    """Enter a run, leave it as if it were finished, and return its content address."""
    run = Run(OURS, settings, out)
    with pytest.raises(UserError, match=r"run\.finish\(\) was never called"), run:
        opened(run)
    write_json(out / "run.json", read_json(out / "run.json") | {"status": "FINISHED"})
    return run.address.digest


def test_killed_while_starting_it_starts_again(
    config: Config, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Over a finished run of another content address, at each of the small files that a start writes."""
    other = config.model_copy(update={"seed": 1})
    crashes = 0
    for instant in range(3):
        entered(inside(other, prepared), tmp_path)
        count = iter(range(100))

        def write(path: Path, value: Any, at: int = instant, count: Iterator[int] = count) -> None:
            if next(count) == at:
                raise Crash
            write_json(path, value)

        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(opening_module, "write_json", write)
            patch.setattr(record_module, "write_json", write)
            with Run(OURS, inside(config, prepared), tmp_path) as run:
                opened(run)
                raise AssertionError("it writes less than that")
        crashes += 1
        address = entered(inside(config, prepared), tmp_path)
        assert read_json(tmp_path / "address.json")["address"] == address
    assert crashes == 3


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_checkpoint_that_cannot_be_written_stops_the_run_or_not(
    on_error: str, finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write, out = checkpoint.write, tmp_path / "run"
    rows: list[int] = []  # that were recorded when the disk was full

    def count() -> int:
        return len((out / "metrics.jsonl").read_text().splitlines())

    def full(snapshot: Snapshot, *rest: Any) -> Path:
        if 4 < snapshot.step < 20:
            rows.append(count())
            raise OSError(28, "No space left on device")
        return write(snapshot, *rest)

    monkeypatch.setattr(checkpoint, "write", full)
    if on_error == "stop":
        with pytest.raises(RunError, match=r"no checkpoint was written: .*No space left on device"):
            finish(every=4, on_error=on_error)
        assert 8 <= count() <= rows[0] + 2, "known with the step under way or the next one, not at the next checkpoint"
        assert [int(path.name[:9]) for path in checkpoint.found(out / "checkpoints")] == [4]
        monkeypatch.setattr(checkpoint, "write", write)
    finish(every=4, on_error=on_error)
    assert capsys.readouterr().err.count("No space left") == (3 if on_error == "continue" else 1)
