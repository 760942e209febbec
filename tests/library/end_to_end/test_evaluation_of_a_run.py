"""The evaluation of a run in a process of its own."""

from pathlib import Path

from clone import command
from support import PROJECT, Trained

from samebits.base.files import read_json
from samebits.record import names


def test_evaluation_gives_the_metrics_of_the_run(untracked: Trained, prepared: Path):
    done = command(PROJECT, "evaluate", "--set", f"data.prepared={prepared}", "--out", untracked.out)
    assert done.returncode == 0, done.stderr
    found, metrics = read_json(untracked.out / "evaluation.json"), read_json(untracked.out / names.METRICS)
    assert sum(map(sum, found.pop("confusion"))) == 359
    assert found.pop("weights") == untracked.weights
    assert found == {name: value for name, value in metrics.items() if name != "steps"}
