"""`samebits noise`: what it says of runs, what it refuses, and that it finds noise where it is planted alone."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from clone import Forked, copied, edit, project_in, verb
from project.config import Config
from safetensors.torch import save_file
from support import OURS, PROJECT

from samebits.analysis.noise import noise
from samebits.analysis.noise.distance import distance
from samebits.analysis.series import Made, Requested, Series
from samebits.core.errors import RunError
from samebits.record.receipt import Receipt
from samebits.start import trainings

# ---- what is said of runs that are made up


def made(folder: Path, name: str, metrics: Mapping[str, Any], weights: Sequence[float], environment: str = "e") -> Made:
    """A run as a series finds it."""
    folder = folder / name
    folder.mkdir(parents=True)
    save_file({"w": torch.tensor(weights)}, folder / "model.safetensors")
    (folder / "metrics.jsonl").write_text("")
    stated = {"metrics": {**metrics, "steps": 3}, "trace": None, "environment": {"environment": environment}}
    return Made(Requested(name), folder, Receipt(f"receipt of {name}", folder / "receipt.json", str(weights), stated))


Runs = dict[str, list[Made]]


def runs(folder: Path, relaxed: Sequence[Any], seeds: Sequence[Any], name: str = "accuracy") -> Runs:
    """Three groups; relaxed runs have other weights where they have another value."""
    strict = [made(folder, f"strict {count}", {name: seeds[0]}, [1.0]) for count in range(len(seeds))]
    others = [made(folder, f"relaxed {n}", {name: value}, [1.0, float(value)]) for n, value in enumerate(relaxed)]
    more = [made(folder, f"seed {n}", {name: value}, [float(n)]) for n, value in enumerate(seeds[1:], 1)]
    return {"strict": strict, "relaxed": others, "seeds": [strict[0], *more]}


def verdicts(folder: Path, *values: Any, **more: Any) -> list[str]:
    return noise.compared(project_in(folder), runs(folder, *values, **more), 2).verdicts


def test_noise_is_a_share_of_the_spread_over_seeds(tmp_path: Path):
    found = verdicts(tmp_path, [0.5, 0.501, 0.502, 0.503, 0.504], [0.5, 0.51, 0.52, 0.53, 0.54])
    assert found[1] == "relaxed: 5 runs with all flags off and 2 threads differ in bits"
    assert found[2].startswith("accuracy: relaxed runs spread 0.0016 (95 % ")
    assert found[2].endswith("noise is 10 % of it")


SAME, SPREAD = [0.5, 0.5, 0.5], [0.5, 0.6, 0.8]


@pytest.mark.parametrize(
    ("relaxed", "seeds", "said"),
    [
        (SAME, SAME, "accuracy: relaxed runs do not differ, seeds neither"),
        (SAME, SPREAD, "accuracy: relaxed runs do not differ, seeds spread 0.15"),
        (SPREAD, SAME, "seeds do not differ: all of it is noise"),
        ([0.5, "nan", 0.5], SPREAD, "accuracy: it is nan in 1 of 3 relaxed runs, so it has no spread; find out why"),
        (SAME, [0.5, "inf", "-inf"], "accuracy: it is inf in 2 of 3 seeds, so it has no spread"),
        (SAME, [1e308, -1e308, 1e308], "accuracy: it is 1e+308 in 3 of 3 seeds"),
        ([0.0, -0.0, 0.0], [0, 0, 0], "accuracy: relaxed runs do not differ, seeds neither"),
    ],
)
def test_verdict_in_words(relaxed: list[Any], seeds: list[Any], said: str, tmp_path: Path):
    found = noise.compared(project_in(tmp_path), runs(tmp_path, relaxed, seeds), 2)
    assert said in found.verdicts[2]
    json.dumps(found.record(), allow_nan=False)
    assert all(line.isprintable() for line in found.lines())


def test_name_of_a_metric_that_moves_the_cursor_is_escaped(tmp_path: Path):
    found = noise.compared(project_in(tmp_path), runs(tmp_path, SPREAD, SPREAD, name="\x1b[2J\nharmless"), 2)
    assert all(line.isprintable() for line in found.lines()) and "\x1b[2J\nharmless" in found.groups["strict"].metrics


def test_metric_that_some_runs_lack_is_left_out(tmp_path: Path):
    given = runs(tmp_path, SAME, SPREAD)
    given["seeds"][1].receipt.stated["metrics"]["f1"] = 0.5
    found = noise.compared(project_in(tmp_path), given, 2)
    assert [*found.groups["seeds"].metrics] == ["accuracy"]
    assert "f1: left out, as some runs do not have it" in found.notes


def test_runs_of_another_machine_are_told(tmp_path: Path):
    given = runs(tmp_path, SAME, SPREAD)
    given["relaxed"][1].receipt.stated["environment"]["environment"] = "another"
    found = noise.compared(project_in(tmp_path), given, 2)
    assert any(line.startswith("the relaxed runs were made in several numeric environments") for line in found.notes)


def test_short_intervals_are_told(tmp_path: Path):
    given = {count: runs(tmp_path / str(count), [0.5] * count, [0.5] * count) for count in (2, 5, 20)}
    notes = {count: " ".join(noise.compared(project_in(tmp_path), held, 2).notes) for count, held in given.items()}
    assert "of fewer than 5 runs an interval is far too short" in notes[2]
    assert "65 % of cases at 5 runs" in notes[5] and notes[20] == ""


# ---- the verb


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A function that asks the verb, whose trainings give these runs."""

    def ask(given: Runs, *words: str) -> Result:
        by_name = {each.requested.name: each for group in given.values() for each in group}
        monkeypatch.setattr(Series, "make", lambda self, wanted: (by_name[each.name] for each in wanted))
        message = ["noise", "--runs", str(len(given["strict"])), "--out", str(tmp_path / "out"), *words]
        return verb(*message)

    monkeypatch.chdir(PROJECT)
    yield ask


def test_strict_runs_that_differ_are_told_first(requested: Any, tmp_path: Path):
    given = runs(tmp_path, SAME, SPREAD)
    given["strict"][2] = made(tmp_path / "other", "strict 2", {"accuracy": 0.5}, [1.0000001])
    done = requested(given)
    assert done.exit_code == 1
    first = done.stdout.splitlines()[0]
    assert first.startswith("DIFFERS: strict 0 and strict 2 have other bits") and "this breaks the contract" in first
    words = first.partition("samebits diff ")[2].split(" ../")
    assert words[0].endswith("strict 0") and words[1].endswith("other/strict 2")
    facts = json.loads(requested(given, "--json").stdout)
    assert not facts["groups"]["strict"]["equal_bits"] and facts["groups"]["strict"]["distances"][1] > 0


def test_strict_runs_that_are_equal_end_with_0(requested: Any, tmp_path: Path):
    done = requested(runs(tmp_path, SAME, SPREAD))
    assert done.exit_code == 0 and "shows no non-determinism" in done.stdout.splitlines()[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--runs", "1"), "--runs 1 seen, 2 or more wanted: one run has no spread"),
        (("--runs", "0"), "--runs 0 seen"),
        (
            ("--set", "determinism.relax=[all]"),
            'determinism.relax=["all"] seen, [] wanted: samebits noise relaxes runs',
        ),
        (("--set", f"seed={2**53 - 1}"), "seed"),
        (("--set", "model.nam=x"), "unknown key"),
        (("--at", "3"), "--runs is for groups, --at for --perturb"),
        (("--perturb", "batch", "--runs", "3"), "--runs is for groups, --at for --perturb"),
    ],
)
def test_wrong_input_is_refused_in_a_line(requested: Any, words: tuple[str, ...], said: str, tmp_path: Path):
    done = requested(runs(tmp_path, SAME, SPREAD), *words)
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_short_trainings_are_those_of_verify(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(PROJECT)
    settings, overrides = noise.requested_for(Config, ["seed=5"], short=True)
    assert (settings.train.epochs, settings.seed) == (2, 5) and set(overrides) == {"train.epochs=2", "seed=5"}
    assert noise.requested_for(Config, ["train.epochs=1"], short=True)[0].train.epochs == 1


def test_groups_take_turns_and_no_training_is_made_twice():
    planned = noise.planned(7, 3, 4)
    message = ["strict 0", "relaxed 0", "strict 1", "relaxed 1", "seed 8", "strict 2", "relaxed 2", "seed 9"]
    assert [each.name for each in planned.values()] == message
    assert planned["relaxed", 2].settings == {"determinism.relax": ["all"], "determinism.cpu": "native"}
    assert planned["relaxed", 2].variables == {"OMP_NUM_THREADS": "4"}


# ---- distances of weights


def saved(path: Path, **tensors: Any) -> Path:
    save_file({name: torch.as_tensor(value) for name, value in tensors.items()}, path)
    return path


def test_distance_is_relative_and_over_all_floating_point_tensors(tmp_path: Path):
    half = torch.tensor([3.0, 0.0], dtype=torch.bfloat16)
    one = saved(tmp_path / "one", a=half, b=torch.tensor(4.0, dtype=torch.float64), n=[7])
    other = saved(tmp_path / "other", a=half, b=torch.tensor(4.5, dtype=torch.float64), n=[70])
    assert distance(one, other) == 0.1 and distance(one, one) == 0
    nothing = saved(tmp_path / "zero", a=[0.0])
    assert distance(nothing, nothing) == 0 and distance(nothing, saved(tmp_path / "1", a=[1.0])) == math.inf
    assert math.isnan(distance(nothing, saved(tmp_path / "nan", a=[math.nan])))


def test_other_tensors_have_no_distance(tmp_path: Path):
    one = saved(tmp_path / "one", a=[1.0])
    for number, other in enumerate(({"b": [1.0]}, {"a": [1.0, 2.0]})):
        with pytest.raises(RunError, match="so the weights have no distance"):
            distance(one, saved(tmp_path / str(number), **other))


# ---- trainings

CORES = len(os.sched_getaffinity(0))
SMALL = ("train.epochs=1", "model.width=8", "model.depth=1", "parallel.global_batch=160")
# The gradient of table[places] is added up by all threads at once where the flags are off.
PLANTED = (
    (
        "        self.head = nn.Linear(width * side * side, CLASSES)\n",
        "        self.table = nn.Parameter(torch.zeros(64))\n"
        "        self.register_buffer('places', torch.randint(64, (65536,)))\n"
        "        self.register_buffer('factors', torch.rand(65536) / 256)\n",
    ),
    (
        "        return self.head(self.dropout(self.features(images).flatten(1)))",
        " + (self.table[self.places] * self.factors).sum() * torch.arange(10) / 10",
    ),
)


@dataclass(frozen=True)
class Measured:
    """A noise floor: the project, and its facts."""

    project: Path
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def planted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """That of a project whose relaxed runs differ."""
    project = tmp_path_factory.mktemp("planted")
    copied(project, ("src", "vendor", "requirements"), ("params.yaml", "dvc.yaml", "pyproject.toml"))
    edit(project_in(project).package / "model.py", *((place, place + added) for place, added in PLANTED))
    words = trainings.sets([*SMALL, f"data.prepared={prepared}"])
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(project)
        patched.setattr(trainings, "run", Forked(tmp_path_factory.mktemp("logs")))
        done = verb("noise", "--runs", "2", "--json", *words, project=project_in(project))
    assert done.exit_code == 0, done.stderr
    return Measured(project, json.loads(done.stdout))


@pytest.mark.long
def test_noise_is_found_where_it_is_planted(planted: Measured):
    groups = planted.facts["groups"]
    assert groups["strict"]["equal_bits"] and groups["strict"]["distances"] == [0]
    assert groups["relaxed"]["equal_bits"] is (CORES == 1) and not groups["seeds"]["equal_bits"]
    assert 0 < groups["seeds"]["distances"][0] < math.inf
    assert (groups["relaxed"]["distances"][0] > 0) is (CORES > 1)
    assert planted.facts["verdicts"][0] == "strict: all 2 runs have equal bits"
    assert planted.facts["threads"] == CORES
    assert json.loads((planted.project / "build" / "noise" / "noise.json").read_text()) == planted.facts


@pytest.mark.long
def test_all_metrics_are_told_with_the_last_loss(planted: Measured):
    for group in planted.facts["groups"].values():
        assert [*group["metrics"]] == ["accuracy", "last_loss", "test_loss"] and len(group["runs"]) == 2
    strict, seeds = (planted.facts["groups"][name] for name in ("strict", "seeds"))
    assert strict["runs"][0] == seeds["runs"][0] and strict["runs"][0] != strict["runs"][1]
    rows = (planted.project / strict["folders"][0] / "metrics.jsonl").read_text().splitlines()
    (logged,) = [row["loss"] for row in (json.loads(line)["metrics"] for line in rows[-2:]) if "loss" in row]
    assert strict["metrics"]["last_loss"]["values"] == [logged, logged]


@pytest.mark.long
def test_shipped_model_shows_no_noise(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The clean control."""
    monkeypatch.chdir(PROJECT)
    series = Series(OURS, Config, tmp_path, (*SMALL, f"data.prepared={prepared}"))
    wanted = noise.planned(0, 2, CORES)
    made = [series.one(wanted["relaxed", number]) for number in range(2)]
    found = noise.compared(OURS, {"strict": made, "relaxed": made, "seeds": made}, CORES)
    assert found.groups["relaxed"].equal_bits and found.groups["relaxed"].distances == [0]
    assert "this machine shows no non-determinism for this model" in found.verdicts[1]
