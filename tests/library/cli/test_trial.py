"""`samebits trial`: a change becomes the default only where nothing gets worse by more than the ranges allow."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from clone import Forked, project_in, verb
from ruamel.yaml import YAML
from support import PROJECT

from samebits.analysis import statistics, trial
from samebits.analysis.trial import FAILS, HOLDS, UNDECIDED, Ranges
from samebits.core.errors import UserError
from samebits.start import trainings

RANGES = Ranges(False, (None, 1.05), (None, 1.05), {"accuracy": (-0.01, None)})
PAIRS = 10


def runs(accuracy: Any, seconds: float = 0.02, memory: int = 2**28, bits: str = "a") -> list[Any]:
    """Trainings of one side, with these accuracies."""
    rng = np.random.default_rng(0)
    return [
        SimpleNamespace(
            metrics={"accuracy": float(value), "steps": 20.0},
            seconds=lambda: (seconds * rng.lognormal(0, 0.02, 40)).tolist(),
            memory=lambda: memory,
            bits=(bits, number),
            receipt=SimpleNamespace(name=f"{bits}{number}"),
        )
        for number, value in enumerate(accuracy)
    ]


def seeds(shift: float = 0, spread: float = 0.004) -> Any:
    """The accuracies of some seeds; the draw of a seed is the same for each side."""
    draws = np.random.default_rng(1).normal(size=PAIRS)
    return 0.95 + shift + spread * draws


def test_change_that_changes_nothing_holds():
    found = trial.judge(runs(seeds()), runs(seeds()), ["loader.workers=2"], RANGES)
    assert found.verdict == HOLDS and found.equal == PAIRS and not found.wider
    assert [each.verdict for each in found.criteria] == [HOLDS] * 3 and found.criteria[0].low == 0
    assert trial.lines(found)[-1] == "loader.workers=2 may become the default"


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        (runs(seeds(-0.02)), "accuracy"),
        (runs(seeds(), seconds=0.022), "seconds"),
        (runs(seeds(), memory=2**29), "memory"),
        (runs([*seeds()[:-1], float("nan")]), "accuracy"),
        (runs([*seeds()[:-1], float("inf")]), "accuracy"),
    ],
)
def test_planted_loss_fails_by_name(changed: Any, failing: str):
    found = trial.judge(runs(seeds()), changed, ["a=1"], RANGES)
    assert found.verdict == FAILS
    assert [each.name for each in found.criteria if each.verdict == FAILS] == [failing]
    assert trial.lines(found)[-1] == "a=1 may not become the default"
    json.dumps(found.record(), allow_nan=False)


def test_wider_spread_fails_and_a_narrower_one_does_not():
    wide, narrow = seeds(spread=0.004), seeds(spread=0.0001)
    ranges = Ranges(False, (None, None), (None, None), {"accuracy": (None, None)})
    worse, better = (
        trial.judge(runs(one), runs(other), ["a=1"], ranges) for one, other in ((narrow, wide), (wide, narrow))
    )
    assert worse.wider == ["accuracy"] and worse.verdict == FAILS
    assert better.wider == [] and better.verdict == HOLDS
    assert any("FAILS, with the change it is wider" in line for line in trial.lines(worse))


def test_bits_are_compared_where_the_project_wants_them_equal():
    ranges = Ranges(True, (None, None), (None, None), {})
    same, other = runs(seeds()), runs(seeds(), bits="b")
    assert trial.judge(same, runs(seeds()), ["a=1"], ranges).verdict == HOLDS
    found = trial.judge(same, other, ["a=1"], ranges)
    assert found.verdict == FAILS and "bits: equal in 0 of 10 pairs: FAILS, all wanted" in trial.lines(found)


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_few_pairs_are_undecided(pairs: int):
    found = trial.judge(runs(seeds()[:pairs]), runs(seeds()[:pairs] + 0.001 * np.arange(pairs)), ["a=1"], RANGES)
    assert found.verdict == UNDECIDED and "give more --pairs" in trial.lines(found)[-1]


def test_change_at_the_edge_of_a_range_holds_in_no_more_than_the_level():
    """The true change is the worst one that is allowed: calling it good is an error, in 2.5 % of 1,000 trials."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(1000):
        difference = rng.normal(-0.01, 0.01, PAIRS)
        held += trial._of_metric("accuracy", np.zeros(PAIRS), difference, (-0.01, None)).verdict == HOLDS
    assert 12 <= held <= 40


def test_interval_of_a_mean_is_that_of_scipy():
    values = np.random.default_rng(3).normal(5, 2, 7)
    theirs = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert statistics.mean_interval(values) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert statistics.mean_interval(np.full(3, 0.1)) == (0.1, 0.1) and statistics.mean_interval(np.ones(1)) is None
    with pytest.raises(FloatingPointError):
        statistics.mean_interval(np.array([1, np.nan]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "results.lock: no `trial` seen"),
        ("trial:\n", "trial: None seen, a mapping wanted"),
        ("trial: {same_bits: false, seconds: [2], memory: [1, 2], metrics: {}}\n", "trial: seconds: [2] seen, [LOW"),
        ("trial: {same_bits: false, seconds: [2, 1], memory: [1, 2], metrics: {}}\n", "trial: seconds: [2, 1] seen"),
        ("trial: {same_bits: 3, seconds: [1, 2], memory: [1, 2], metrics: {}}\n", "trial.same_bits"),
        ("trial: {same_bits: true, seconds: [1, 2]}\n", "trial.memory"),
        ("trial: {same_bits: true, seconds: [a, 2], memory: [1, 2], metrics: {}}\n", "trial.seconds[0]"),
    ],
)
def test_ranges_that_are_none_are_refused(tmp_path: Path, text: str, said: str):
    (tmp_path / "results.lock").write_text(f"tolerance:\nresults:\n{text}")
    with pytest.raises(UserError) as refused:
        trial.ranges(SimpleNamespace(root=tmp_path))
    assert said in str(refused.value)


def test_metric_that_no_run_has_is_refused():
    ranges = Ranges(False, (None, None), (None, None), {"f1\033[31m": (None, None)})
    with pytest.raises(UserError, match="no run has it; they have: accuracy, steps") as refused:
        trial.judge(runs(seeds()), runs(seeds()), ["a=1"], ranges)
    assert "\033" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.shift=1"], "train.shift=1: the project has this already"),
        (["seed=3"], "seed: each pair has a seed of its own"),
        (["train.shift"], "KEY=VALUE"),
        (["train.shiff=2"], "did you mean train.shift?"),
        ([], "Missing argument"),
    ],
)
def test_change_that_is_none_is_refused(words: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(PROJECT)
    done = verb("trial", *words)
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_trial_trains_pairs_and_enters_the_sheet(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(trainings, "run", Forked(tmp_path))
    words = "trial", "loader.workers=1", "--pairs", "1", "--set", "train.epochs=1", "--record"
    done = verb(*words, "--json", project=project_in(project))
    assert done.exit_code == 1, done.stderr  # one pair decides nothing
    facts = json.loads(done.stdout)
    assert (facts["equal"], facts["verdict"]) == (1, UNDECIDED)
    assert facts["criteria"][0]["change"] == 0  # the same bits give the same metric
    again = verb(*words, project=project_in(project))
    assert again.stdout.count("made before") == 2 and "trials.yaml: entry 2 is written" in again.stdout
    sheet = YAML(typ="safe").load(project / "trials.yaml")
    (project / "trials.yaml").unlink()
    assert len(sheet) == 2 and sheet[0] == sheet[1] and len(sheet[0]["commit"]) == 40
    assert {key: value for key, value in sheet[0].items() if key != "commit"} == facts
