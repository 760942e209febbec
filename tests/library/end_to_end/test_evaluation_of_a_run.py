"""The evaluation of a run in a process of its own."""

from pathlib import Path

import pytest
from clone import command
from support import PROJECT, Trained

from samebits.base.files import read_json
from samebits.record import names


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_gives_the_metrics_of_the_run(workers: int, untracked: Trained, prepared: Path):
    settings = f"data.prepared={prepared}", f"loader.workers={workers}"
    words = [word for text in settings for word in ("--set", text)]
    done = command(PROJECT, "evaluate", *words, "--out", untracked.out)
    assert done.returncode == 0, done.stderr
    found, metrics = read_json(untracked.out / "evaluation.json"), read_json(untracked.out / names.METRICS)
    assert sum(map(sum, found.pop("confusion"))) == 359
    assert found.pop("weights") == untracked.weights
    assert found == {name: value for name, value in metrics.items() if name != "steps"}
