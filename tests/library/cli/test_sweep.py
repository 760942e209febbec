"""`samebits sweep`: each combination is trained once, whatever fails or interrupts, and bad words train nothing."""

import csv
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from clone import verb
from project.config import Config
from support import LIBRARY, OURS, PROJECT, Trained
from warm import Warm

from samebits.analysis import sweep, swept
from samebits.base.files import read_json
from samebits.core.errors import UserError
from samebits.record import names
from samebits.record.receipt import read
from samebits.start import trainings

Sweep = Callable[..., Any]
PAGE = LIBRARY / "docs" / "sweep.md"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The command lines of the trainings, which are forked."""
    words: list[Sequence[str]] = []

    def start(project: Any, line: Sequence[str], log: Path, environ: Any) -> Warm:
        words.append(line)
        return Warm(*line[line.index("train") + 1 :], out=log, err=log, env=environ)

    monkeypatch.setattr(trainings, "start", start)
    monkeypatch.chdir(PROJECT)
    return words


@pytest.fixture
def swept_in(prepared: Path, tmp_path: Path) -> Sweep:
    """A function that sweeps short trainings in this process, into a folder of the test's own."""

    def run(*words: str, tracking: str = "false") -> Any:
        settings = "train.epochs=1", f"data.prepared={prepared}", f"tracking.enabled={tracking}", "checkpoint.every=2"
        sets = [word for text in settings for word in ("--set", text)]
        return verb("sweep", *words, *sets, "--out", tmp_path / "sweep")

    return run


@pytest.mark.long
def test_each_combination_is_trained_once_and_what_fails_is_named(
    swept_in: Sweep, started: list[Sequence[str]], untracked: Trained, tmp_path: Path
):
    """The page shows it."""
    done = swept_in("train.learning_rate=0.002,0.004,1e30", "seed=0..1", "--jobs", "2")
    assert done.exit_code == 1, done.output
    lines, out = done.stdout.splitlines(), tmp_path / "sweep"
    named = [line.split("  ")[1] for line in lines[:6]]
    rates = "0.002", "0.004", "1e30"
    assert named == [f"train.learning_rate={rate} seed={seed}" for rate in rates for seed in (0, 1)]
    shown = PAGE.read_text().partition("--jobs 2\n")[2].partition("\nsweep.csv")[0].splitlines()
    assert len(shown) == 10 and {*shown} - {*lines} == {"..."}
    assert len(started) == 6
    first = out / lines[2][:16]
    assert read(first).stated["address"].startswith(lines[2][:16])
    assert read(first).weights == untracked.weights  # neither --quiet nor a sweep changes a bit
    failed = [line for line in done.stderr.splitlines() if line.startswith("FAILED: ")]
    assert len(failed) == 2 and all("train.learning_rate=1e30 seed=" in line for line in failed)
    assert all(": exit code 3: step 1: the gradient is not finite" in line for line in failed)
    (row,) = [line.split() for line in lines if line.startswith("train.learning_rate=0.004") and "accuracy" in line]
    assert row[2] == "2" and float(row[4]) < float(row[3]) < float(row[5])
    rows = [*csv.reader((out / swept.TABLE).read_text().splitlines())]
    assert rows[0][:3] == ["address", "train.learning_rate", "seed"] and len(rows) == 5
    assert float(rows[3][rows[0].index("accuracy")]) == read(first).stated["metrics"]["accuracy"]
    assert (out / swept.PICTURE).read_bytes().startswith(b"\x89PNG")

    started.clear()
    again = swept_in("train.learning_rate=0.004", "seed=0..1")
    assert again.exit_code == 0 and not started and again.stdout.count("made before") == 2
    (first / names.WEIGHTS).write_bytes(b"of another run")  # which is found, and made again
    assert swept_in("train.learning_rate=0.004", "seed=0..1").exit_code == 0
    assert len(started) == 1 and read(first).weights == untracked.weights


def test_interrupted_sweep_ends_its_trainings_and_goes_on(
    swept_in: Sweep, started: list[Sequence[str]], untracked: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sleep = sweep.time.sleep

    def interrupted(seconds: float) -> None:
        if any(path.read_bytes().count(b"\n") > 4 for path in (tmp_path / "sweep").glob(f"*/{names.METRIC_ROWS}")):
            raise KeyboardInterrupt
        sleep(0.002)

    states: list[str] = []

    def tracked(project: Any, runs: Any, report: Any, status: str = "RUNNING", files: Any = ()) -> str:
        states.append(status)
        return "0" * 32

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "tracked", tracked)
        patch.setattr(sweep.time, "sleep", interrupted)
        done = swept_in("seed=0,1")
    assert states == ["RUNNING", "KILLED"]
    assert done.exit_code == 130 and done.stderr.splitlines()[-1] == "interrupted" and len(started) == 1
    (run,) = (tmp_path / "sweep").glob(f"*/{names.RUN}")
    assert read_json(run)["status"] == "KILLED" and "SIGTERM" in run.parent.with_suffix(".log").read_text()
    done = swept_in("seed=0")
    assert done.exit_code == 0, done.output
    assert f"resumed {run.parent} after step" in run.parent.with_suffix(".log").read_text()
    assert read(run.parent).weights == untracked.weights


REFUSED = {
    "seed=4..0": "seed=4..0: 4 to 0 seen, 1 to 10000 whole numbers wanted, the smallest first",
    "seed=0..10000": "seed=0..10000: 0 to 10000 seen, 1 to 10000 whole numbers wanted, the smallest first",
    "seed=": "seed=: an empty value seen, a list such as seed=1,2 wanted",
    "seed=1,,2": "seed=1,,2: an empty value seen, a list such as seed=1,2 wanted",
    "seed": "seed: KEY=VALUE,VALUE or KEY=FIRST..LAST wanted, such as seed=0..4",
    "train.epoch=1,2": "--set train.epoch: unknown key; did you mean train.epochs?",
    "seed=1,a": "--set seed: 'a' given, a whole number wanted",
    "seed=0 seed=1": "seed: named twice; give all its values in one word",
    "seed=1..100 train.epochs=1..101": "10100 combinations seen, at most 10000 wanted",
    "seed=1 --ranks 9": "--ranks 9 given, at most parallel.micro_batches=8 wanted: each runs one",
}
ONE_RUN = "loader.workers=0,2", "seed=1,1", "determinism.cpu=portable,native", "train.learning_rate=0.004,4e-3"


@pytest.mark.parametrize("words", REFUSED)
def test_bad_words_train_nothing(words: str, swept_in: Sweep, started: list[Sequence[str]]):
    done = swept_in(*words.split())
    assert (done.exit_code, done.stderr, done.stdout) == (2, f"{REFUSED[words]}\n", "") and not started


@pytest.mark.parametrize("word", ONE_RUN)
def test_values_of_one_content_address_are_refused_by_name(word: str, swept_in: Sweep, started: list[Sequence[str]]):
    done = swept_in(word)
    first, second = word.partition("=")[2].split(",")
    key = word.partition("=")[0]
    assert done.exit_code == 2 and not started and done.stdout == ""
    assert done.stderr.startswith(f"{key}={first} and {key}={second}: one content address (")


def test_lists_are_values():
    assert sweep.values("verify.shorten=[a,b],[c]") == ("verify.shorten", ["[a,b]", "[c]"])
    assert sweep.values("seed=-1..1") == ("seed", ["-1", "0", "1"])
    assert sweep.values("model.name=convnet, transformer") == ("model.name", ["convnet", "transformer"])
    with pytest.raises(UserError):
        sweep.values("=1")


class Slow:
    """A process that ends when it is looked at for the third time."""

    most = here = 0

    def __init__(self, *words: Any) -> None:
        Slow.here += 1
        Slow.most = max(Slow.most, Slow.here)
        self.pid, self.looks = id(self), 0

    def poll(self) -> int | None:
        self.looks += 1
        Slow.here -= self.looks == 3
        return 7 if self.looks >= 3 else None


def test_so_many_at_a_time_as_jobs_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Config):
    monkeypatch.setattr(trainings, "start", Slow)
    monkeypatch.setattr(sweep, "PAUSE", 0)
    runs = [sweep.Wanted({"seed": str(seed)}, config, f"{seed:064}", tmp_path / str(seed)) for seed in range(7)]
    said: list[str] = []
    failed = sweep.made(OURS, runs, [], 1, sweep.places(runs, 1, 3), said.append)
    assert Slow.most == 3 and len(failed) == 7
    assert failed[0].line().endswith(f"exit code 7: it printed nothing ({tmp_path}/0.log)")


def wanted(config: Config, folder: Path, count: int, device: str = "auto") -> list[sweep.Wanted]:
    config = config.model_copy(update={"device": device})
    return [sweep.Wanted({"seed": str(seed)}, config, f"{seed:064}", folder / str(seed)) for seed in range(count)]


@pytest.mark.parametrize(("visible", "names"), [(None, ["0,1", "2,3"]), ("3, 1,GPU-a,GPU-b,7", ["3,1", "GPU-a,GPU-b"])])
def test_each_job_has_gpus_of_its_own(
    visible: str | None, names: list[str], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held: dict[int, str] = {}
    seen = set()

    class Holding(Slow):
        """It is alone on its GPUs as long as it runs."""

        def __init__(self, project: Any, words: Any, log: Any, environ: dict[str, str]) -> None:
            super().__init__()
            assert environ[sweep.VISIBLE] not in held.values()
            held[self.pid] = environ[sweep.VISIBLE]
            seen.add(held[self.pid])

        def poll(self) -> int | None:
            code = super().poll()
            if code is not None:
                held.pop(self.pid)
            return code

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(trainings, "start", Holding)
    monkeypatch.setattr(sweep, "PAUSE", 0)
    monkeypatch.delenv(sweep.VISIBLE, raising=False)
    if visible:
        monkeypatch.setenv(sweep.VISIBLE, visible)
    runs = wanted(config, tmp_path, 5)
    assert len(sweep.made(OURS, runs, [], 2, sweep.places(runs, 2, 2), lambda line: None)) == 5
    assert sorted(seen) == sorted(names) and not held


def test_too_few_gpus_are_refused_in_a_line(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    said = "--jobs 2 of 2 ranks: 3 GPUs seen, 4 wanted, one for each rank of each job; give fewer --jobs, or "
    with pytest.raises(UserError, match=f"^{said}--set device=cpu$"):
        sweep.places(wanted(config, tmp_path, 5), 2, 2)
    assert sweep.places(wanted(config, tmp_path, 5, "cpu"), 2, 2) == [{}, {}]
    assert sweep.places(wanted(config, tmp_path, 1), 2, 2) == [{}]  # one job has all, as it would alone
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert sweep.places(wanted(config, tmp_path, 5), 2, 2) == [{}, {}]


@pytest.mark.long
def test_mlflow_shows_the_runs_as_children_of_one(
    swept_in: Sweep, started: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path / "mlruns"))
    done = swept_in("seed=0", tracking="true")
    assert done.exit_code == 0, done.output
    with closing(sqlite3.connect(tmp_path / "runs.db")) as store:
        runs = dict(store.execute("SELECT run_uuid, status FROM runs").fetchall())
        children = dict(store.execute("SELECT run_uuid, value FROM tags WHERE key = 'mlflow.parentRunId'").fetchall())
    (parent,) = {*children.values()}
    assert len(children) == 1 and parent in runs and parent not in children and {*runs.values()} == {"FINISHED"}
    kept = {path.name for path in (tmp_path / "mlruns").rglob("sweep.*")}
    assert kept == {swept.TABLE, swept.PICTURE}


def test_server_that_does_not_answer_costs_the_parent_and_no_run(
    started: list[Sequence[str]], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unreachable(*given: Any, **more: Any) -> str:
        raise trainings.Ended(["parent"], 1, ["no server"])

    monkeypatch.setattr(trainings, "run", unreachable)
    said: list[str] = []
    runs = sweep.planned(OURS, Config, ["seed=0"], [f"data.prepared={prepared}"], 1, tmp_path, said.append)
    assert sweep.tracked(OURS, runs, said.append) == "" and said == ["MLflow has no run of this sweep: no server"]
