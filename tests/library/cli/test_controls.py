"""The controls of `samebits verify`: what must differ, does; where it does not, verify ends with 1 and names it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from clone import command, edit
from support import OURS, PACKAGE

from samebits.analysis import controls, verify
from samebits.analysis.controls import SEED, TAKEN, UNUSED, chosen_controls, conclusion, try_controls, weight_zeroed
from samebits.analysis.verify import ONCE, Row, Way
from samebits.record import names

MUST, OWNED = controls.DIFFERS, "optimizer sharded on 2 ranks"


def rows_of(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """The verdicts, by row."""
    lines = [line for line in done.stdout.splitlines() if len(line) > 68 and not line.startswith("does not")]
    return {line[:30].rstrip(): line[68:] for line in lines}


@pytest.mark.long
def test_seed_reaches_each_use_of_it_and_a_broken_state_is_found(project: Path, tmp_path: Path):
    """The clean control of the controls."""
    done = command(cloned(project, tmp_path), "verify", "--only", SEED, "--only", TAKEN, "--set", "train.epochs=1")
    assert done.returncode == 0, done
    rows = rows_of(done)
    zeroed = rows.pop(TAKEN)
    assert zeroed.startswith(MUST), done
    assert rows == {ONCE.name: "EQUAL"} | {f"{SEED}: {use}": MUST for use in UNUSED}


@pytest.mark.long
def test_seed_that_does_not_arrive_is_found_in_each_use_of_it(project: Path, tmp_path: Path):
    """Weights, items and dropout that the owner seeds with a constant; verify finds equal bits in each way."""
    here = cloned(project, tmp_path)
    folder = here / "src" / PACKAGE
    edit(folder / "model.py", ("    model = config.model\n", "    torch.manual_seed(0)\n    model = config.model\n"))
    head = "return self.head(self.dropout(self.features(images).flatten(1)))"
    seeded = "features = self.features(images).flatten(1)\n        torch.manual_seed(0)"
    edit(folder / "model.py", (head, f"{seeded}\n        return self.head(self.dropout(features))"))
    edit(folder / "model.py", ("from torch import ", "import torch\nfrom torch import "))
    edit(folder / "data.py", ("        if self.shift:\n", "        torch.manual_seed(0)\n        if self.shift:\n"))
    done = command(here, "verify", "--only", SEED, "--only", "once more", "--set", "train.epochs=1")
    assert done.returncode == 1, done
    rows = rows_of(done)
    assert rows.pop(f"{SEED}: order") == MUST
    assert [rows.pop(name) for name in (ONCE.name, "once more")] == ["EQUAL", "EQUAL"]
    found = "EQUAL: two seeds leave torch's generator in one state: your code seeds it, such as torch.manual_seed(0)"
    assert rows == {f"{SEED}: {use}": found for use in UNUSED if use != "order"}
    odd = "; ".join(f"{SEED}: {use}" for use in UNUSED if use != "order")
    assert done.stdout.splitlines()[-1].startswith(f"does not differ, as it must: {odd}. Mend it first")


@pytest.mark.long
def test_what_draws_nothing_and_an_optimizer_that_cannot_be_sharded_are_no_failures(project: Path, tmp_path: Path):
    """Their rows say why; the others count."""
    here = cloned(project, tmp_path)
    before, after = "AdamW(parameter_groups(model, settings.weight_decay), fused=True)", "Adafactor(model.parameters())"
    edit(here / "src" / PACKAGE / "train.py", (before, after))
    sets = [word for key in ("train.epochs=1", "model.dropout=0", "train.shift=0") for word in ("--set", key)]
    only = [word for row in (SEED, "once more", OWNED) for word in ("--only", row)]
    done = command(here, "verify", *only, *sets)
    rows = rows_of(done)
    assert rows[ONCE.name] == rows["once more"] == "EQUAL", done
    refused = "not tried: parallel.shard: Adafactor does not update each element by itself ("
    assert rows[OWNED].startswith(refused) and rows[OWNED].endswith("or parallel.shard=none"), rows
    assert done.stdout.splitlines()[-1] == "EQUAL: 2 of 2 trainings"
    assert done.returncode == 0 and {name for name, verdict in rows.items() if verdict == MUST} == {
        f"{SEED}: initial weights",
        f"{SEED}: order",
    }
    assert {rows[f"{SEED}: {use}"] for use in ("augmentation", "dropout")} == {
        UNUSED["augmentation"],
        UNUSED["dropout"],
    }


def cloned(project: Path, folder: Path) -> Path:
    """A copy of the project, to plant faults in."""
    return Path(shutil.copytree(project, folder / "clone", ignore=shutil.ignore_patterns("__pycache__", "build")))


# ---- the verdicts


def seen(value: Any = None, drawn: tuple[str, ...] = (), torch: str = "one") -> dict[str, Any]:
    return {"value": value, "drawn": [*drawn], "left": {"python": "p", "torch": torch}}


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        (seen(1), seen(2), MUST),
        (seen(1), seen(1), ""),
        (seen(1, ("torch",)), seen(1, ("torch",), "two"), ""),  # as where weights are loaded
        (seen(1, ("torch",)), seen(1, ("torch",)), "EQUAL: two seeds leave torch's"),
        (seen(1, ("torch",)), seen(2, ("torch",)), MUST),
        (seen(None, ("torch",)), seen(None, ("torch",), "two"), MUST),
        (seen(None, ("torch",)), seen(None, ("torch",)), "EQUAL: two seeds leave torch's"),
        (seen(None, ("python", "torch")), seen(None, ("python", "torch"), "two"), "EQUAL: two seeds leave python's"),
        (seen(), seen(), ""),
    ],
)
def test_use_of_the_seed_is_judged_by_its_value_and_by_the_generators(
    one: Mapping[str, Any], other: Mapping[str, Any], verdict: str
):
    said = controls._reached(one, other)
    assert said.startswith(verdict) and bool(said) == bool(verdict)


WAY, GOOD = Row("way", "EQUAL"), Row("control", MUST, control=True)


@pytest.mark.parametrize(
    ("rows", "compared", "holds", "last"),
    [
        ([WAY, WAY, GOOD], True, True, "EQUAL: 2 of 2 trainings"),
        ([WAY, GOOD], False, True, "EQUAL: 1 of 1 trainings"),
        ([WAY, GOOD], True, False, "NOT COMPARED: 1 of 1 trainings"),
        ([WAY, Row("way", "DIFFERS"), GOOD], True, False, "DIFFERS: 1 of 2 trainings"),
        ([WAY, WAY, Row("control", UNUSED["dropout"], control=True)], True, True, "EQUAL: 2 of 2 trainings"),
        ([WAY, WAY, Row("control", "EQUAL: so", control=True)], True, False, "does not differ, as it must: control. "),
        ([WAY, WAY, Row("control", "FAILED: so", control=True)], True, False, "does not differ, as it must: control. "),
    ],
)
def test_equality_counts_for_nothing_where_a_control_does_not_differ(
    rows: list[Row], compared: bool, holds: bool, last: str
):
    held, lines = conclusion(rows, compared)
    assert held == holds and lines[-1].startswith(last)


def test_controls_are_chosen_by_name_and_all_are_tried_without_one():
    assert chosen_controls([]) == ([SEED, TAKEN], [])
    assert chosen_controls(["2 ranks", TAKEN]) == ([TAKEN], ["2 ranks"])


# Exit codes of the training that is stopped and of the resumed one, what the latter says, and its weights
@pytest.mark.parametrize(
    ("codes", "said", "weights", "verdict"),
    [
        ((143, 1), "step 3, made again: loss …: the resumed run is not the same run.", "", f"{MUST}: refused"),
        ((143, 0), "", "other", MUST),
        ((143, 0), "", "same", "EQUAL: a resumed run ends with equal weights from a state that is broken"),
        ((143, 1), "no such thing", "", "FAILED: it ended with 1:\nno such thing"),
        ((2, 0), "slip", "", "FAILED: it ended with 2:\nslip"),
    ],
)
def test_comparison_that_cannot_fail_is_found(
    codes: tuple[int, int], said: str, weights: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The trainings are scripts that write weights, and end."""
    monkeypatch.setattr(verify, "FOLDER", tmp_path)
    monkeypatch.setattr(controls, "FOLDER", tmp_path)
    for folder, held in ((ONCE.folder, "same"), (Way(TAKEN).folder, weights)):
        folder.mkdir()
        (folder / names.WEIGHTS).write_text(held)
        (folder / names.METRIC_ROWS).write_text(json.dumps({"step": 8, "metrics": {"epoch": 1.0}}) + "\n")
    left = iter(codes)

    def start(way: Way, settings: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
        way.log.write_text(said)
        return subprocess.Popen([sys.executable, "-c", f"import os; os._exit({next(left)})"])

    (row,) = weight_zeroed(OURS, {}, 0, start)
    assert row.control and row.verdict == verdict


def test_no_control_is_tried_where_nothing_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "FOLDER", tmp_path)
    assert [*try_controls(OURS, 0, lambda way, settings: pytest.fail("started"), {}, [SEED, TAKEN])] == []
