"""How long a user waits for each command: the table of docs/times.md.

python measure/times.py [--rounds N] [--out FILE]

In a round each command runs once, as a process of its own, after all others; so other work on the machine hits all
alike. Commands that take minutes run once.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from rounds import ROOT, TOOLS, bake, harness

RESULT = ROOT / "docs" / "times.md"
ROUNDS = 5
STEPS = 10**6  # of the long traces
RUN, OTHER, LONG, LONGER, NEW = (f"build/{name}" for name in ("run", "other", "long", "longer", "new"))
EPOCH = ("--set", "train.epochs=1")
UNTRACKED = ("--set", "tracking.enabled=false")
THERE = ("--set", "tracking.uri=sqlite:///build/there.db")
HEAD = "wait | goal, s | seconds | least … most | runs"


@dataclass(frozen=True)
class Wait:
    """What a user waits for."""

    title: str
    words: tuple[str, ...] = ()  # the arguments of python; none for the generation of a project
    goal: float = 0  # seconds; 0 where there is none
    once: bool = False  # whether it takes so long that it runs once
    ends: int = 0  # its exit code
    starter: str = ""  # of a new project, in which `make repro` runs


def verb(*words: str) -> tuple[str, ...]:
    """Of `samebits`."""
    return ("-m", "samebits", *words)


STARTERS = json.loads((ROOT / "cookiecutter.json").read_text())["starter"]
TRAIN = ("-m", "samebits", "train", "--out", NEW, *EPOCH)
WAITS = (
    Wait("Python alone that imports torch, as a measure", ("-c", "import torch")),
    Wait("generation: `cookiecutter --no-input`", goal=0.5),
    Wait("`samebits check`", verb("check", RUN, *EPOCH, *UNTRACKED), goal=0.5),
    Wait("`samebits verify-receipt`", verb("verify-receipt", RUN), goal=0.5),
    Wait("`samebits diff` of two equal runs", verb("diff", RUN, OTHER), goal=0.5),
    Wait(
        f"`samebits diff` of {STEPS:,} steps, the last of which differs", verb("diff", LONG, LONGER), goal=1.0, ends=1
    ),
    Wait("`samebits env`", verb("env"), goal=2.5),
    Wait("`samebits doctor`", verb("doctor")),
    Wait("training for one epoch, untracked", (*TRAIN, *UNTRACKED)),
    Wait("the same, tracked in a new SQLite file", (*TRAIN, "--set", f"tracking.uri=sqlite:///{NEW}.db")),
    Wait("the same, tracked in a file that is there", (*TRAIN, *THERE)),
    Wait("`samebits verify`, all ways and controls", verb("verify"), goal=60.0, once=True),
    *(Wait(f"`make repro` of a new project, starter {each}", goal=180.0, once=True, starter=each) for each in STARTERS),
)


# ---- in the project


def lengthen(out: str, last: int) -> None:
    """Make a run's trace long: the rows of its first step again and again, and at its end one with `last` in it."""
    import hashlib

    from samebits.record import chain, names

    path = Path(out, names.STEP_ROWS)
    first, link, rows = path.read_bytes()[: chain.STEP.itemsize], bytes(chain.LINK), []
    for step in range(STEPS):
        data = step.to_bytes(4, "little") + first[4:]
        data = data if step + 1 < STEPS else data[:-1] + bytes([last])
        link = hashlib.sha256(link + data).digest()[: chain.LINK]
        rows.append(data + link)
    path.write_bytes(b"".join(rows))


def checkpoint(width: int = 2048) -> list[list[float]]:
    """Seconds of 24 matrices, 100 million parameters with AdamW: a step, a checkpoint's copy, and its writing."""
    import torch

    from samebits.checkpoint.checkpoint import Origin
    from samebits.checkpoint.saver import Saver
    from samebits.config.settings import Checkpoint
    from samebits.core.state import State

    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = State.of(model, optimizer, {})
    origin, often = Origin("0" * 64, "0" * 64), Checkpoint(every=1, keep=1, on_error="stop")
    saver = Saver(Path("build/stall"), origin, often, lambda: None)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.rand(64, width)).square().mean().backward()
        optimizer.step()

    def timed(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    numbers = iter(range(5))
    waits = step, lambda: saver.save(state.look(next(numbers))), saver.wait
    taken = [[timed(wait) for wait in waits] for _ in range(5)]  # the copy before its writing, always
    assert not saver.failure()
    return [list(each) for each in zip(*taken, strict=True)]


# ---- here


def from_nothing(starter: str, out: Path) -> float:
    """How long the first `make repro` of a new project takes, with its environment by uv.

    Raises:
        SystemExit: it failed.
    """
    project = bake(out, starter=starter)
    path = f"{TOOLS}:{os.environ['PATH']}"  # uv is there
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VENV")} | {"PATH": path}
    began = time.perf_counter()
    words = ["make", "--no-print-directory", "repro", "INSTALLER=uv"]
    done = subprocess.run(words, cwd=project, env=environ, text=True, capture_output=True)
    taken = time.perf_counter() - began
    shutil.rmtree(project)
    if done.returncode:
        sys.exit(f"make repro of {starter} ended with {done.returncode}:\n{done.stdout}{done.stderr[-3000:]}")
    return taken


def seconds(project: Path, wait: Wait) -> float:
    """How long it takes now; a training has a new folder, and a new database."""
    if wait.starter:
        return from_nothing(wait.starter, project.parent / "new")
    shutil.rmtree(project / NEW, ignore_errors=True)
    (project / f"{NEW}.db").unlink(missing_ok=True)
    began = time.perf_counter()
    if wait.words:
        harness.printed(project, *wait.words, ends=[wait.ends])
    else:
        bake(project.parent / "generated")
    return time.perf_counter() - began


def row(title: str, goal: float, taken: list[float]) -> list[object]:
    """A line of the table."""
    wanted, most = harness.two_digits(goal) if goal else "", f"{min(taken):.2f} … {max(taken):.2f}"
    return [title, wanted, f"{median(taken):.2f}", most, len(taken)]


def rows(project: Path, requested: Namespace) -> Iterator[list[object]]:
    """Prepare two equal runs, and two that are long and differ in their last step; the lines of the table."""
    train = partial(harness.printed, project, "-m", "samebits", "train", *EPOCH, "--out")
    for out in (RUN, OTHER):
        train(out, *UNTRACKED)
    train("build/first", *THERE)
    for last, out in enumerate((LONG, LONGER)):
        shutil.copytree(project / RUN, project / out)
        harness.within(project, lengthen, out, last)
    often = [wait for wait in WAITS if not wait.once]
    taken = harness.in_turn(often, lambda wait: seconds(project, wait), range(requested.rounds))
    taken |= harness.in_turn([wait for wait in WAITS if wait.once], lambda wait: seconds(project, wait), range(1))
    yield from (row(wait.title, wait.goal, taken[wait]) for wait in WAITS)
    steps, copies, writes = harness.within(project, checkpoint)
    yield row("a step of 100 million parameters with AdamW, 64 samples, as a measure", 0, steps)
    yield row("its checkpoint: the copy, for which the next step waits", median(steps), copies)
    yield row("its checkpoint: the writing, while steps go on", 0, writes)


if __name__ == "__main__":
    harness.measure(__doc__, RESULT, (HEAD, rows), rounds=ROUNDS)
