"""The strict environment stands before a stage imports torch: it starts again, once, where something is missing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, python

from samebits.config.settings import Determinism
from samebits.core.flag_table import ALLOCATION
from samebits.core.flags import applicable, missing_variables

STRICT = Determinism(cpu="portable", relax=())
VARIABLES = [flag.name for flag in applicable(STRICT) if flag.setting]
OWN = {"MALLOC_TRIM_THRESHOLD_": "1048576"}

NOTING = """
import json, os, sys

def note(event):
    facts = {"event": event, "pid": os.getpid(), "arguments": sys.orig_argv,
             "hashes_randomised": sys.flags.hash_randomization, "environ": dict(os.environ)}
    with open(os.environ["NOTES"], "a") as notes:
        print(json.dumps(facts), file=notes)

def hook(event, arguments):
    if event == "import" and arguments[0] in ("torch", "numpy"):
        note(arguments[0])
        os._exit(0)

note("start")
sys.addaudithook(hook)
"""
LATE = f"""
import torch
from {PACKAGE} import PROJECT
from {PACKAGE}.config import Config
from samebits.start import launch
launch.begin(PROJECT, Config)
"""


def notes_of(tmp_path: Path, module: str, env: dict[str, str | None]) -> list[dict[str, Any]]:
    """What a stage notes at each start of its process, and when it first imports torch or numpy and ends."""
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    (tmp_path / "late.py").write_text(LATE)
    notes = tmp_path / "notes"
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    env = env | {"PYTHONPATH": path, "NOTES": str(notes)}
    done = python("-X", "dev", "-m", module, "--set", "seed=5", env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in notes.read_text().splitlines()]


def unset_at_import(notes: list[dict[str, Any]]) -> list[str]:
    """The variables that were not in place when torch or numpy was first imported."""
    return list(missing_variables(STRICT, notes[-1]["environ"]))


STAGES = [f"{PACKAGE}.{stage}" for stage in ("prepare", "train", "evaluate")]


@pytest.mark.parametrize("stage", STAGES)
def test_stage_starts_again_once_and_is_strict_before_torch_is_imported(tmp_path: Path, stage: str):
    notes = notes_of(tmp_path, stage, dict.fromkeys(VARIABLES))
    assert [note["event"] for note in notes[:-1]] == ["start", "start"]
    assert notes[-1]["event"] in ("torch", "numpy") and unset_at_import(notes) == []
    assert len({note["pid"] for note in notes}) == 1
    assert notes[0]["arguments"][1:] == notes[1]["arguments"][1:]
    assert [note["hashes_randomised"] for note in notes] == [1, 0, 0]


def test_stage_with_everything_in_place_does_not_start_again(tmp_path: Path):
    notes = notes_of(tmp_path, STAGES[0], {})
    assert [note["event"] for note in notes[:-1]] == ["start"] and unset_at_import(notes) == []


@pytest.mark.parametrize("own", [{}, OWN])
def test_training_keeps_memory_as_the_table_says_or_as_its_user_does(tmp_path: Path, own: dict[str, str]):
    notes = notes_of(tmp_path, f"{PACKAGE}.train", {**dict.fromkeys(ALLOCATION), **own})
    assert [note["event"] for note in notes[:-1]] == ["start"] * (1 if own else 2)
    environ = notes[-1]["environ"]
    assert {name: environ[name] for name in [*ALLOCATION, *OWN] if name in environ} == (own or ALLOCATION)


def test_stage_that_imports_torch_too_early_is_found(tmp_path: Path):
    assert unset_at_import(notes_of(tmp_path, "late", dict.fromkeys(VARIABLES))) == VARIABLES
