"""`samebits compare`: a difference between groups of runs is called more than noise where it is, and nowhere else."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clone import verb
from handmade import write
from support import OURS, python

from samebits.record import names
from samebits.tracking import tracking

LOW, HIGH = [0.9861, 0.9875, 0.9889, 0.9847, 0.9902], [0.9944, 0.9958, 0.9931, 0.9972, 0.9919]


def run(
    folder: Path, metrics: dict[str, Any], seed: int = 0, requested: dict[str, Any] | None = None, cpu: str = "any"
) -> Path:
    """Write what a finished run leaves that a comparison reads, and return its directory."""
    environment = {"device": "cpu", "cpu": cpu}
    return write(folder, steps=0, seed=seed, metrics=metrics, config=requested, environment=environment)


def group(folder: Path, accuracies: Sequence[float], metric: str = "accuracy", **more: Any) -> list[Path]:
    """A run of each seed with these values of a metric."""
    return [
        run(folder / str(seed), {metric: value, "steps": 23}, seed, **more) for seed, value in enumerate(accuracies)
    ]


def message(*words: str | Path, code: int = 0) -> str:
    """What `samebits compare` prints, in this process."""
    done = verb("compare", *words)
    assert done.exit_code == code, done.output
    return done.output


def refusal(*words: str | Path) -> str:
    """Why it refuses, in a line."""
    said = message(*words, code=2)
    assert said.count("\n") == 1
    return said


def facts(*words: str | Path) -> dict[str, Any]:
    """What it says as JSON."""

    def forbid(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(message(*words, "--json"), parse_constant=forbid)


@pytest.fixture
def low(tmp_path: Path) -> list[Path]:
    """Five runs."""
    return group(tmp_path / "low", LOW)


@pytest.fixture
def high(tmp_path: Path) -> list[Path]:
    """Five runs that are better by far."""
    return group(tmp_path / "high", HIGH, requested={"train.learning_rate": 0.003})


# ---- verdicts


def test_planted_difference_is_found(low: list[Path], high: list[Path]):
    lines = message(*low, "--", *high).splitlines()
    assert lines[0] == "A: 5 runs; B: 5 runs"
    assert lines[1] == "A and B differ in what was asked for: config.train.learning_rate: 0.004 | 0.003"
    assert lines[3].startswith("accuracy: B is higher by 0.00700 (95 % interval 0.00")
    times = (np.mean(HIGH) - np.mean(LOW)) / np.sqrt((np.var(HIGH, ddof=1) + np.var(LOW, ddof=1)) / 2)
    assert f"), {times:.2g} times the deviation between runs; " in lines[3]
    assert lines[3].endswith("permutation test p = 0.00794, exact over 252 partitions: more than noise.")
    assert lines[4].startswith("accuracy, spread: ") and lines[4].endswith(": not shown to be another spread.")
    assert "B is lower by 0.00700 (95 % interval 0.00" in message(*high, "--", *low)


def test_clean_control_is_not_flagged(tmp_path: Path):
    values = [*LOW, *HIGH]
    a, b = group(tmp_path / "a", values[::2]), group(tmp_path / "b", values[1::2])
    last = message(*a, "--", *b).splitlines()[-2]
    assert "not shown to be more than noise. About " in last and last.endswith("comparisons (normal approximation).")
    assert facts(*a, "--", *b)["compared"][0]["of_means"]["runs_wanted"] > 5


def test_three_against_three_cannot_decide_and_says_so(low: list[Path], high: list[Path]):
    said = message(*low[:3], "--", *high[:3]).splitlines()
    why = "undecided, for no test can decide with so few runs"
    assert said[-2].endswith(f"p = 0.1, exact over 20 partitions: {why}; 4 per group could.")
    assert said[-1].endswith(f"p = 1, exact over 6 partitions: {why}; 5 per group could.")
    assert message(*low[:4], "--", *high[:4]).splitlines()[-2].endswith(": more than noise.")


def test_one_run_against_one_has_neither_interval_nor_spread(low: list[Path], high: list[Path]):
    (found,) = facts(low[0], "--", high[0])["compared"]
    assert (found["size"]["interval"], found["size"]["deviation"], found["of_spreads"]) == (None, None, None)
    assert "B is higher by 0.00830; permutation test p = 1, " in found["of_means"]["sentence"]


def test_more_metrics_want_more_runs_and_the_sentence_says_so(tmp_path: Path):
    """Four against four can reach p = 2/70, which is 0.057 of two metrics."""
    a, b = (
        [run(tmp_path / name / str(seed), {"x": seed + add, "y": seed - add}, seed) for seed in range(4)]
        for name, add in (("a", 0), ("b", 10))
    )
    both = facts(*a, "--", *b)["compared"]
    assert [each["of_means"]["adjusted"] for each in both] == pytest.approx([4 / 70, 4 / 70])
    assert "(0.0571 adjusted for 2 metrics)" in both[0]["of_means"]["sentence"]
    assert both[0]["of_means"]["sentence"].endswith(
        "no test of 2 metrics can decide with so few runs; 5 per group could."
    )
    assert facts(*a, "--", *b, "--metric", "y")["compared"][0]["of_means"]["sentence"].endswith(": more than noise.")


def test_equal_bits_leave_no_noise_to_compare_with(tmp_path: Path):
    a, b = (group(tmp_path / name, [0.1 + 0.2] * 3) for name in "ab")
    said = message(*a, "--", *b).splitlines()
    assert said[1:] == ["accuracy: all 6 values are 0.30000000000000004: equal bits, and no noise to compare with."]


def test_difference_of_groups_without_any_spread_is_no_noise(tmp_path: Path):
    """Not even one in the last bit."""
    a, b = group(tmp_path / "a", [0.3] * 3), group(tmp_path / "b", [0.1 + 0.2] * 3)
    last = message(*a, "--", *b).splitlines()[-1]
    assert last.startswith("accuracy: B is higher by 5.55e-17; permutation test p = 0.1, exact over 20 partitions: ")
    assert last.endswith("no group has any spread, so there is no noise here, and the difference is not noise.")


def test_smaller_spread_after_a_fix_is_found(tmp_path: Path):
    """Five runs that differ in noise alone, and five of equal bits."""
    a = [run(tmp_path / "a" / str(number), {"loss": value}) for number, value in enumerate(LOW)]
    b = [run(tmp_path / "b" / str(number), {"loss": LOW[0]}) for number in range(5)]
    found = facts(*a, "--", *b)["compared"][0]
    assert found["of_spreads"]["sentence"].endswith("p = 0.0286, exact over 70 partitions: B spreads less.")
    assert found["size"]["noise_floor"] == found["size"]["deviation"]
    assert "times the noise floor, the deviation between runs of one content address" in found["of_means"]["sentence"]


def test_noise_floor_is_the_deviation_between_runs_of_one_content_address(tmp_path: Path):
    a, b = (
        [run(tmp_path / name / str(n), {"x": add + n // 2 + (n + 1) / 1000}, seed=n // 2) for n in range(6)]
        for name, add in (("a", 0), ("b", 5))
    )
    said = facts(*a, "--", *b)
    (found,) = said["compared"]
    assert found["size"]["noise_floor"] == pytest.approx(0.001 / 2**0.5)
    assert "times the noise floor, that of runs of one content address; " in found["of_means"]["sentence"]
    assert "(6 runs of 3 in A, 6 runs of 3 in B): a repeat is no new draw" in said["notes"][0]


# ---- what is told of the groups


def test_runs_that_differ_in_more_than_the_seed_are_told(low: list[Path], tmp_path: Path):
    other = run(
        tmp_path / "other", {"accuracy": 0.99, "steps": 23}, requested={"train.learning_rate": 0.1}, cpu="another"
    )
    notes = facts(*low, other, "--", *group(tmp_path / "b", HIGH))["notes"]
    assert notes[:2] == [
        "A: its runs differ in more than the seed: config.train.learning_rate",
        "the runs differ in numeric environment: cpu",
    ]


def test_metric_of_one_group_alone_is_told(low: list[Path], tmp_path: Path):
    b = [run(tmp_path / "b" / str(n), {"accuracy": value, "f1": 1}, n) for n, value in enumerate(HIGH)]
    found = facts(*low, "--", *b)
    assert [each["metric"] for each in found["compared"]] == ["accuracy"]
    assert "f1: not compared, as one group alone has it" in found["notes"]


# ---- how runs are named


def test_receipts_and_run_directories_say_the_same_and_their_order_nothing(low: list[Path], high: list[Path]):
    said = message(*low, "--", *high)
    assert said == message(*[path / names.RECEIPT for path in low[::-1]], "--", *high[::-1])
    assert said == message(*low, "--", *high)


def test_command_takes_options_on_either_side_and_folders_with_spaces(low: list[Path], tmp_path: Path):
    spaced = group(tmp_path / "with spaces", HIGH)
    done = python("-m", "samebits", "compare", *low, "--", *spaced, "--metric", "accuracy", "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout == message("--json", "--metric=accuracy", *low, "--", *spaced)
    assert json.loads(done.stdout)["compared"][0]["of_means"]["p"] == pytest.approx(2 / 252)


def test_training_loads_nothing_of_the_lab():
    """A stage refuses modules that the content address lacks, and `samebits train` is one of these verbs."""
    names = "[name for name in sys.modules if '.analysis' in name or 'scipy' in name]"
    loaded = f"import sys, samebits.cli; print({names})"
    assert python("-c", loaded).stdout == "[]\n"


# ---- what is refused


def test_groups_that_are_not_two_are_refused(low: list[Path], high: list[Path]):
    wanted = "one between the groups wanted: samebits compare A... -- B...\n"
    assert refusal(*low, *high) == f"no -- seen, {wanted}"
    assert refusal(*low, "--", *high[:2], "--", *high[2:]) == f"2 -- seen, {wanted}"
    assert refusal() == f"no -- seen, {wanted}"
    assert refusal("--", *high).startswith("group A: no run before the --, one or more wanted")
    assert refusal(*low, "--").startswith("group B: no run after the --, one or more wanted")
    assert refusal(*low, "--", "").startswith("'': no such run directory, receipt or MLflow run id")
    assert refusal(*low, "--", "nowhere").startswith("nowhere: no such run directory, receipt or MLflow run id")
    assert refusal(*low, *high, "--metric", "--") == f"no -- seen, {wanted}"


def test_run_given_twice_is_refused_under_any_name(low: list[Path], high: list[Path], tmp_path: Path):
    copy = shutil.copytree(low[0], tmp_path / "copy")
    assert f"{low[0]} and {copy}: the same run given twice" in refusal(*low, copy, "--", *high)
    assert "the same run given twice" in refusal(*low, "--", *high, low[2] / names.RECEIPT)
    assert f"{low[0]}: the same run given twice" in refusal(low[0], low[0], "--", *high)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e300])
def test_what_is_no_finite_number_is_refused(value: float, low: list[Path], tmp_path: Path):
    b = group(tmp_path / "b", HIGH)
    folder = tmp_path / "ill"
    run(folder, {"accuracy": value})
    said = refusal(*low, "--", *b, folder)
    assert f"{folder}: accuracy is {value}, a finite number up to 1e+300 wanted" in said


def test_metric_that_a_run_lacks_is_refused(low: list[Path], high: list[Path], tmp_path: Path):
    bare = run(tmp_path / "bare", {"f1": 0.5, "steps": 23})
    assert f"{bare}: no metric accuracy, it has f1, steps; choose with --metric NAME" in refusal(
        *low, bare, "--", *high
    )
    assert f"{low[0]}: no metric '', it has accuracy, steps" in refusal(*low, "--", *high, "--metric", "")
    assert "no metric that both groups have: accuracy | f1 seen (A | B)" in refusal(*low, "--", bare)
    assert "all 6 values are 23.0: equal bits" in message(*low, "--", bare, "--metric", "steps")


def test_altered_and_unfinished_runs_are_refused(low: list[Path], high: list[Path]):
    (low[0] / names.METRICS).write_text('{"accuracy": 1.0, "steps": 23}')
    assert f"{low[0] / names.METRICS}: other metrics than receipt.json beside it states" in refusal(*low, "--", *high)
    altered = low[1] / names.RECEIPT
    altered.write_bytes(altered.read_bytes().replace(b"0.004", b"0.005"))
    assert f"{altered}: altered: address is not the hash of its preimage" in refusal(*low[1:], "--", *high)
    (low[2] / names.RECEIPT).unlink()
    assert f"{low[2] / names.RECEIPT}: missing; the receipt of a finished run is wanted" in refusal(
        *low[2:], "--", *high
    )


def test_hostile_names_of_metrics_print_no_line_and_no_colour_of_their_own(tmp_path: Path):
    name = "\x1b[31mx\naccuracy: B is higher by 1; p = 0: more than noise.\u202e" + "x" * 100
    a, b = (group(tmp_path / each, values, metric=name) for each, values in (("a", LOW), ("b", HIGH)))
    lines = message(*a, "--", *b).splitlines()
    assert len(lines) == 4 and all(line.isprintable() and len(line) < 350 for line in lines)
    assert lines[2].startswith(r"'\x1b[31mx\naccuracy: B is")
    assert facts(*a, "--", *b)["compared"][0]["metric"] == name


# ---- MLflow


@pytest.mark.long  # a new store takes seconds
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_runs_and_experiments_of_mlflow_say_the_same(
    low: list[Path], high: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in tracking.QUIET.items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    monkeypatch.chdir(OURS.root)
    uri = f"sqlite:///{tmp_path}/runs.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri)
    ids = {}
    for name, folders in (("low rates", low), ("high", high)):
        experiment = client.create_experiment(name, f"file://{tmp_path}/artifacts-{len(ids)}")
        for folder in [*folders, tmp_path]:
            one = client.create_run(experiment).info.run_id
            if folder == tmp_path:
                continue  # one that is still running
            for file in (names.RECEIPT, names.METRICS):
                client.log_artifact(one, str(folder / file))
            client.set_terminated(one)
            ids.setdefault(name, []).append(one)
    said = message(*low, "--", *high)
    assert message("experiment:low rates", "--", *ids["high"]) == said
    assert "the same run given twice" in refusal("experiment:high", "--", ids["high"][0])
    assert "experiment:none: MLflow has no such experiment" in refusal(*low, "--", "experiment:none")
    client.create_experiment("empty")
    assert "experiment:empty: no finished run is in it" in refusal(*low, "--", "experiment:empty")
    foreign = client.create_run(client.get_experiment_by_name("empty").experiment_id).info.run_id
    client.set_terminated(foreign)
    assert f"{foreign}/receipt.json: missing; the receipt of a finished run" in refusal(*low, "--", "experiment:empty")
    assert "set MLFLOW_TRACKING_URI" in refusal(*low, "--", "0" * 32)
