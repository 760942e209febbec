"""How long a user waits for each command: the table of docs/times.md.

python measure/times.py [--rounds N] [--out FILE]

In a round each command runs once, as a process of its own, after all others; so other work on the machine hits all
alike. Commands that take minutes run once.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from document import marked, write
from rounds import NAME, PACKAGE, ROOT, VENV, about, bake, in_venv, make_venv

RESULT = ROOT / "docs" / "times.md"
PROJECT = ROOT / "build" / "times" / NAME
ROUNDS = 5
STEPS = 10**6  # of the long traces
RUN, OTHER, LONG, LONGER, NEW = (f"build/{name}" for name in ("run", "other", "long", "longer", "new"))
EPOCH = ("--set", "train.epochs=1")
UNTRACKED = ("--set", "tracking.enabled=false")
THERE = ("--set", "tracking.uri=sqlite:///build/there.db")
HEAD = """| wait | goal, s | seconds | least … most | runs |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class Wait:
    """What a user waits for.

    Attributes:
        words: the arguments of python; none for the generation of a project.
        goal: seconds; 0 where there is none.
        once: whether it takes so long that it runs once.
        ends: its exit code.
    """

    title: str
    words: tuple[str, ...]
    goal: float = 0
    once: bool = False
    ends: int = 0


def verb(*words: str) -> tuple[str, ...]:
    """Of `repro`."""
    return ("-m", PACKAGE, *words)


TRAIN = ("-m", f"{PACKAGE}.train", "--out", NEW, *EPOCH)
WAITS = (
    Wait("Python alone that imports torch, as a measure", ("-c", "import torch")),
    Wait("generation: `cookiecutter --no-input`", (), goal=0.5),
    Wait("`repro check`", verb("check", RUN, *EPOCH, *UNTRACKED), goal=0.5),
    Wait("`repro verify-receipt`", verb("verify-receipt", RUN), goal=0.5),
    Wait("`repro diff` of two equal runs", verb("diff", RUN, OTHER), goal=0.5),
    Wait(f"`repro diff` of {STEPS:,} steps, the last of which differs", verb("diff", LONG, LONGER), goal=1.0, ends=1),
    Wait("`repro env`", verb("env"), goal=2.5),
    Wait("`repro doctor`", verb("doctor")),
    Wait("training for one epoch, untracked", (*TRAIN, *UNTRACKED)),
    Wait("the same, tracked in a new SQLite file", (*TRAIN, "--set", f"tracking.uri=sqlite:///{NEW}.db")),
    Wait("the same, tracked in a file that is there", (*TRAIN, *THERE)),
    Wait("`repro verify`: 17 trainings", verb("verify"), goal=60.0, once=True),
)


# A run's trace made long: the rows of its first step again and again; of two, one differs in the last row.
LENGTHEN = """
import hashlib, sys
from {package}.repro.record import chain, names
place, steps, last = sys.argv[1:]
path = f"{place}/{names.STEP_ROWS}"
row, link, rows = open(path, "rb").read(chain.STEP.itemsize), bytes(chain.LINK), []
for step in range(int(steps)):
    data = step.to_bytes(4, "little") + row[4:]
    data = data if step + 1 < int(steps) else data[:-1] + bytes([int(last)])
    link = hashlib.sha256(link + data).digest()[:chain.LINK]
    rows.append(data + link)
open(path, "wb").write(b"".join(rows))
"""


# A checkpoint of 24 matrices, 100 million parameters with AdamW: a step, the copy for which the next one waits, and the
# writing, which it does not wait for.
CHECKPOINT = """
import json, time, torch
from pathlib import Path
from {package}.repro.config.settings import Checkpoint
from {package}.repro.checkpoint.checkpoint import Origin
from {package}.repro.core.optimizers import Optimizers
from {package}.repro.checkpoint.saver import Saver

model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(24)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
origin, often = Origin("0" * 64, "0" * 64), Checkpoint(every=1, keep=1, on_error="stop")
saver = Saver(Path("build/stall"), origin, often, lambda: None)
steps, copies, writes = [], [], []

def timed(times, function, *given):
    began = time.perf_counter()
    function(*given)
    times.append(time.perf_counter() - began)

def step():
    optimizer.zero_grad()
    model(torch.rand(64, 2048)).square().mean().backward()
    optimizer.step()

for number in range(5):
    timed(steps, step)
    timed(copies, saver.save, number, model, Optimizers(optimizer))
    timed(writes, saver.wait)
assert not saver.failure()
print(json.dumps([steps, copies, writes]))
"""


def python(*words: str, ends: int = 0) -> tuple[float, str]:
    """Run the project's python, which is to end with this exit code: the seconds that it took, and its output."""
    began = time.perf_counter()
    done = subprocess.run(
        [f"{VENV}/bin/python", *words], cwd=PROJECT, env=in_venv(PROJECT), text=True, capture_output=True
    )
    took = time.perf_counter() - began
    if done.returncode != ends:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return took, done.stdout


def prepare() -> None:
    """A project with two equal runs, and with two that are long and differ in their last step."""
    bake(PROJECT.parent)
    make_venv(PROJECT)
    python("-m", f"{PACKAGE}.prepare")
    for out in (RUN, OTHER):
        python("-m", f"{PACKAGE}.train", "--out", out, *EPOCH, *UNTRACKED)
    python("-m", f"{PACKAGE}.train", "--out", "build/first", *EPOCH, *THERE)
    for last, out in enumerate((LONG, LONGER)):
        shutil.copytree(PROJECT / RUN, PROJECT / out)
        python("-c", LENGTHEN.replace("{package}", PACKAGE), out, str(STEPS), str(last))


def seconds(wait: Wait) -> float:
    """How long it takes now; a training has a new folder, and a new database."""
    if not wait.words:
        began = time.perf_counter()
        bake(PROJECT.parent / "generated")
        return time.perf_counter() - began
    shutil.rmtree(PROJECT / NEW, ignore_errors=True)
    (PROJECT / f"{NEW}.db").unlink(missing_ok=True)
    return python(*wait.words, ends=wait.ends)[0]


def row(title: str, goal: float, taken: list[float]) -> str:
    """A line of the table."""
    wanted, middle = f"{goal:.2g}" if goal else "", f"{statistics.median(taken):.2f}"
    return f"| {title} | {wanted} | {middle} | {min(taken):.2f} … {max(taken):.2f} | {len(taken)} |"


def checkpoint() -> list[str]:
    """The lines on a large checkpoint."""
    steps, copies, writes = json.loads(python("-c", CHECKPOINT.replace("{package}", PACKAGE))[1])
    return [
        row("a step of 100 million parameters with AdamW, 64 samples, as a measure", 0, steps),
        row("its checkpoint: the copy, for which the next step waits", statistics.median(steps), copies),
        row("its checkpoint: the writing, while steps go on", 0, writes),
    ]


def main() -> None:
    """Measure, and write the table into the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    marked(asked.out)
    prepare()
    place = about()
    taken: dict[str, list[float]] = {wait.title: [] for wait in WAITS}
    for number in range(asked.rounds):
        for wait in WAITS:
            if not (wait.once and number):
                taken[wait.title].append(seconds(wait))
        print(f"round {number + 1} of {asked.rounds}", flush=True)
    lines = [row(wait.title, wait.goal, taken[wait.title]) for wait in WAITS]
    made = "\n".join([place, "", HEAD, *lines, *checkpoint()])
    write(asked.out, made)
    print(made)


if __name__ == "__main__":
    main()
