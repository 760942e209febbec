"""`samebits smoke`: the whole way, short."""

from pathlib import Path

import pytest
from clone import command, verb
from support import PROJECT, Trained

from samebits.address.manifest import sha256_file
from samebits.record import receipt
from samebits.record.receipt import read
from samebits.start import trainings


@pytest.mark.long
def test_short_run_is_trained_and_evaluated(project: Path):
    before = (project / "artifacts" / "receipt.json").read_bytes()
    done = command(project, "smoke", "--set", "train.epochs=1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["train", "evaluate"]
    assert lines[0] == f"train: weights {sha256_file(project / 'build' / 'smoke' / 'model.safetensors')}"
    assert "accuracy" in lines[1] and (project / "build" / "smoke" / "evaluation.json").is_file()
    assert (project / "artifacts" / "receipt.json").read_bytes() == before


def test_evaluation_that_prints_nothing_is_done(untracked: Trained, monkeypatch: pytest.MonkeyPatch):
    """A new blank project measures nothing."""
    monkeypatch.setattr(trainings, "prepared", lambda project, settings, report: None)
    monkeypatch.setattr(trainings, "run", lambda project, words: "")
    monkeypatch.setattr(receipt, "read", lambda out: read(untracked.out))
    monkeypatch.chdir(PROJECT)
    done = verb("smoke")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"train: weights {read(untracked.out).weights}\nevaluate: done, it printed nothing\n"


def test_stage_that_fails_is_told_with_its_words(project: Path):
    done = command(project, "smoke", "--set", "data.prepared=nowhere")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "nowhere/manifest.json: missing. Prepare the data first" in done.stderr
