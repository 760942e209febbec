"""`repro noise` finds noise where it is planted, and makes none up where there is none."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clone import copied, project_in
from conftest import PACKAGE, PROJECT
from project import PROJECT as OURS
from project.config import Config
from project.repro.analysis.noise import noise
from project.repro.analysis.series import Series

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
class Ended:
    """Verbs that ended: the lines of one that was killed, of the next one, and its facts."""

    project: Path
    killed: list[str]
    lines: list[str]
    facts: dict[str, Any]


def start(project: Path, prepared: Path) -> "subprocess.Popen[str]":
    settings = [word for each in (*SMALL, f"data.prepared={prepared}") for word in ("--set", each)]
    words = [sys.executable, "-m", PACKAGE, "noise", "--runs", "2", "--json", *settings]
    environ = os.environ | {"PYTHONPATH": str(project / "src")}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, cwd=project, env=environ, text=True, start_new_session=True, **piped)


@pytest.fixture(scope="module")
def planted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A project whose relaxed runs differ: the verb is killed after its first training, and asked again."""
    project = tmp_path_factory.mktemp("planted")
    copied(project, ("src", "requirements"), ("params.yaml", "dvc.yaml", "pyproject.toml"))
    model = project_in(project).package / "model.py"
    text = model.read_text()
    for place, added in PLANTED:
        assert text.count(place) >= 1
        text = text.replace(place, place + added, 1)
    model.write_text(text)
    first = start(project, prepared)
    assert first.stderr
    killed = [first.stderr.readline()]
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = start(project, prepared)
    out, err = second.communicate()
    assert second.returncode == 0, err
    return Ended(project, killed, err.splitlines(), json.loads(out))


@pytest.mark.long
def test_noise_is_found_where_it_is_planted(planted: Ended):
    groups = planted.facts["groups"]
    assert groups["strict"]["equal_bits"] and groups["strict"]["distances"] == [0]
    assert groups["relaxed"]["equal_bits"] is (CORES == 1) and not groups["seeds"]["equal_bits"]
    assert 0 < groups["seeds"]["distances"][0] < math.inf
    assert (groups["relaxed"]["distances"][0] > 0) is (CORES > 1)
    assert planted.facts["verdicts"][0] == "strict: all 2 runs have equal bits"
    assert planted.facts["threads"] == CORES
    assert json.loads((planted.project / "build" / "noise" / "noise.json").read_text()) == planted.facts


@pytest.mark.long
def test_all_metrics_are_told_with_the_last_loss(planted: Ended):
    for group in planted.facts["groups"].values():
        assert [*group["metrics"]] == ["accuracy", "last_loss", "test_loss"] and len(group["runs"]) == 2
    strict, seeds = (planted.facts["groups"][name] for name in ("strict", "seeds"))
    assert strict["runs"][0] == seeds["runs"][0] and strict["runs"][0] != strict["runs"][1]
    rows = (planted.project / strict["folders"][0] / "metrics.jsonl").read_text().splitlines()
    (logged,) = [row["loss"] for row in (json.loads(line)["metrics"] for line in rows[-2:]) if "loss" in row]
    assert strict["metrics"]["last_loss"]["values"] == [logged, logged]


@pytest.mark.long
def test_killed_verb_goes_on_where_it_was(planted: Ended):
    assert planted.killed[0].startswith("1/5  strict 0: weights ") and "made before" not in planted.killed[0]
    assert [line.split(":")[0] for line in planted.lines] == [
        "1/5  strict 0", "2/5  relaxed 0", "3/5  strict 1", "4/5  relaxed 1", "5/5  seed 1",
    ]  # fmt: skip
    assert ["made before" in line for line in planted.lines] == [True, False, False, False, False]
    assert planted.killed[0].split(",")[0] == planted.lines[0].split(",")[0]


def test_shipped_model_shows_no_noise(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The clean control."""
    monkeypatch.chdir(PROJECT)
    series = Series(OURS, Config, tmp_path, (*SMALL, f"data.prepared={prepared}"))
    wanted = noise.planned(0, 2, CORES)
    made = [series.one(wanted["relaxed", number]) for number in range(2)]
    found = noise.compared(OURS, {"strict": made, "relaxed": made, "seeds": made}, CORES)
    assert found.groups["relaxed"].equal_bits and found.groups["relaxed"].distances == [0]
    assert "this machine shows no non-determinism for this model" in found.verdicts[1]
