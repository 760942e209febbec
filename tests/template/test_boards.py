"""TensorBoard and Weights & Biases show a run by the lines that the page on tracking has, and change no bit of it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bake import ROOT, in_venv
from baked import Bake, InstalledProject, commit_all, copy_venv, weights

LOCK = ROOT / "requirements" / "boards.txt"
PAGE = ROOT / "samebits" / "docs" / "tracking.md"
LOOP = "    for step in run.steps("
SHORT = [word for key in ("train.epochs=1", "tracking.enabled=false") for word in ("--set", key)]
SCALARS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps([[[event.step, event.value] for event in events.Scalars(name)] for name in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def boards(bake: Bake, project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> InstalledProject:
    """A project whose lock and environment have both packages, as after `make lock`; its data are prepared."""
    path, python = bake().path, copy_venv(tmp_path_factory.mktemp("boards") / "venv", LOCK)
    for lock in ("train-cpu.txt", "train-cuda.txt"):
        with (path / "requirements" / lock).open("a") as pins:
            pins.write(LOCK.read_text())
    env = in_venv(path, project.env, python.parents[1])
    return replace(project, path=path, env=env, python=python)


def shown(project: InstalledProject, package: str, *words: str) -> Path:
    """Train with the lines of the page that import this package; return the run directory."""
    (block,) = (each for each in re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text()) if package in each)
    imports, _, lines = block.partition("\n    ")
    train = project.path / "src" / project.package / "train.py"
    plain = train.read_text()
    docstring, _, rest = plain.partition("\n\n")
    train.write_text(f"{docstring}\n\n{imports}\n{rest}".replace(LOOP, f"    {lines}\n{LOOP}"))
    commit_all(project.path, project.env)
    out = Path("runs", package)
    project.run("python", "-m", "samebits", "train", *SHORT, *words, "--out", out)
    train.write_text(plain)
    return project.path / out


def rows(out: Path, name: str) -> list[tuple[int, float]]:
    """What a run has logged under a name."""
    found = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["metrics"][name]) for row in found if name in row["metrics"]]


@pytest.mark.long
def test_boards_have_the_numbers_of_a_run_whose_bits_they_leave_alone(boards: InstalledProject) -> None:
    """And rank 0 alone writes, of two."""
    boards.run("python", "-m", "samebits", "train", *SHORT, "--out", "runs/plain")
    by_tensorboard, by_wandb = shown(boards, "tensorboard", "--ranks", "2"), shown(boards, "wandb")
    assert len({weights(out) for out in (boards.path / "runs" / "plain", by_tensorboard, by_wandb)}) == 1

    assert len([*(by_tensorboard / "tensorboard").iterdir()]) == 1
    names = "loss", "accuracy"
    found = json.loads(boards.run("python", "-c", SCALARS, by_tensorboard / "tensorboard", *names))
    assert found == [[[at, float(np.float32(value))] for at, value in rows(by_tensorboard, name)] for name in names]

    (written,) = by_wandb.glob("wandb/offline-run-*/*.wandb")
    kept, losses = written.read_bytes(), [json.dumps(value).encode() for _, value in rows(by_wandb, "loss")]
    assert len(losses) > 20 and all(loss in kept for loss in losses)
