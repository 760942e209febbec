"""Eleven training loops as public repositories have them meet no word that is not earned, and keep their bits."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from ordinary import LOOPS
from support import TESTS
from warm import PACKAGE, Warm

SCRIPT = TESTS / "ordinary_ways.py"


@pytest.fixture(scope="module")
def ended(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each loop gave and printed: straight, stopped, resumed, and on two ranks."""
    keys = (
        f"data.prepared={prepared}",
        "tracking.enabled=false",
        "trace.level=step",
        "parallel.micro_batches=4",
        "parallel.global_batch=32",
    )
    base = tmp_path_factory.mktemp("ordinary")
    trainings = {}
    for ranks in (None, 2):
        folder, message = base / f"{ranks}", base / f"{ranks}.err"
        trainings[folder] = (
            Warm(PACKAGE, str(folder), *keys, out=message, err=message, ranks=ranks, script=SCRIPT),
            message,
        )
    for training, message in trainings.values():
        assert training.wait() == 0, message.read_text()
    alone, both = (json.loads((folder / "ended.json").read_text()) for folder in trainings)
    return alone | {"two ranks": both["whole"]}


# What a loop has earned: the operation that differs between CPUs, and the remedy. The line is that of its update.
EARNED = {
    "nanogpt_like": "AdamW(..., fused=True)",
    "curriculum": "an optimizer with fused=True, such as AdamW",
    "multi_task": "an optimizer with fused=True, such as AdamW",
    "frozen_backbone": "Adagrad(..., fused=True)",
}


def earned(loop: str) -> list[str]:
    """The lines that a run of this loop prints."""
    if loop not in EARNED:
        return []
    lines, first = inspect.getsourcelines(LOOPS[loop])
    (place,) = (first + number for number, line in enumerate(lines) if "optimizer.step()" in line)
    message = f"sqrt float32 at ordinary.py:{place}: its bits differ between CPUs. Use {EARNED[loop]}"
    return [message, "this run is out of the class cpu-portable: another CPU may compute other bits"]


@pytest.mark.long
@pytest.mark.parametrize("loop", LOOPS)
def test_ordinary_loop_is_told_what_it_has_earned_and_keeps_its_bits(loop: str, ended: dict[str, dict[str, Any]]):
    mine = {way: loops[loop] for way, loops in ended.items() if loop in loops}
    assert {way: each["failure"] for way, each in mine.items() if each["failure"]} == {}
    stopped = "stopped by SIGTERM after step 2; the same command goes on from there"
    message = {"whole": earned(loop), "stopped": [*earned(loop), stopped], "resumed": [], "two ranks": earned(loop)}
    assert {way: each["told"] for way, each in mine.items()} == message | ({"as told": []} if loop in EARNED else {})
    kept = {way: each["digests"] for way, each in mine.items() if way not in ("stopped", "as told")}
    assert kept["whole"] == kept["resumed"] == kept["two ranks"] and len(kept["whole"]) == 3


@pytest.mark.long
def test_loops_differ(ended: dict[str, dict[str, Any]]):
    """So no loop stands for another one."""
    assert len({each["digests"][0] for each in ended["whole"].values()}) == len(LOOPS) == 11
