"""`samebits smoke`: the whole way, short."""

from pathlib import Path

import pytest
from clone import command

from samebits.address.manifest import sha256_file


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


def test_stage_that_fails_is_told_with_its_words(project: Path):
    done = command(project, "smoke", "--set", "data.prepared=nowhere")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "nowhere/manifest.json: missing. Prepare the data first" in done.stderr
