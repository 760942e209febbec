"""The table of parts (below), and how each kind of part is measured."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from trainings import ANYWHERE, PROJECTS_OWN, Failed, Trainer, digests, mebibytes, milliseconds, resumed_after

Row = dict[str, Any]  # JSON values
SECONDS = 450  # after which a part is stopped
SIDE_BY_SIDE = max(1, min(4, len(os.sched_getaffinity(0)) // 4))  # trainings of which only the bits count


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    name: str
    measured: str
    measure: Callable[["Part", Trainer], Iterator[Row]]  # yields a row for each result, as soon as it is there
    settings: tuple[str, ...] = ()  # keys of params.yaml
    on_a_card: tuple[str, ...] = ()  # those that join them on a GPU only, for a CPU would take hours
    sides: Mapping[str, "Side"] = field(default_factory=dict)  # what `pairs` compares

    def requested(self, trainer: Trainer) -> tuple[str, ...]:
        """The settings on the trainer's device."""
        return (*self.settings, *(self.on_a_card if trainer.device == "cuda" else ()))


@dataclass(frozen=True)
class Side:
    """One of two that are compared in time and memory: a function of sharing.py trains it, with settings."""

    settings: tuple[str, ...] = ()
    script: str = PROJECTS_OWN


@dataclass(frozen=True)
class Way:
    """A way to train that must not change a bit."""

    settings: tuple[str, ...] = ()
    ranks: int = 1
    kernels: str = "kernels"
    killed: bool = False


WAYS = {
    "again": Way(kernels="kernels-again"),  # compiled anew, too, as on another day
    "2 ranks": Way(ranks=2),
    "4 ranks": Way(ranks=4),
    "4 workers": Way(("loader.workers=4",)),
    "killed, resumed": Way(killed=True),
}


def bits(part: Part, trainer: Trainer) -> Iterator[Row]:
    """A row for each way, compared with one process that has no workers: EQUAL, DIFFERS or FAILED."""
    once = trainer.train("once", *part.requested(trainer))
    yield {"way": "once", "digests": digests(once)}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        rows = [pool.submit(_compared, way, trainer, part.requested(trainer), once) for way in WAYS]
        yield from (row.result() for row in as_completed(rows))


def _compared(title: str, trainer: Trainer, requested: tuple[str, ...], once: Path) -> Row:
    way, name, row = WAYS[title], title.replace(", ", "-").replace(" ", "-"), {"way": title}
    try:
        if way.killed:
            trainer.killed(name, *requested, *way.settings)
        out = trainer.train(name, *requested, *way.settings, ranks=way.ranks, kernels=way.kernels, anew=not way.killed)
        if way.killed:
            row["resumed after step"] = resumed_after(trainer.output(name))
    except Failed as failure:
        return row | {"verdict": "FAILED", "said": str(failure)}
    if digests(out) == digests(once):
        return row | {"verdict": "EQUAL", "digests": digests(out)}
    where = "\n".join(trainer.lines("diff", str(once), str(out)))
    return row | {"verdict": "DIFFERS", "digests": digests(out), "said": where}


def pairs(part: Part, trainer: Trainer) -> Iterator[Row]:
    """A row for each pair of runs, one per side; the sides take turns, so that a busy machine hits both alike."""
    for number in range(1, trainer.pairs + 1):
        row: Row = {"pair": number}
        for side in list(part.sides)[:: 1 if number % 2 else -1]:
            # with workers, because loading would hide the step
            settings, script = (*part.requested(trainer), *part.sides[side].settings), part.sides[side].script
            out = trainer.train(f"{side}-{number}", *settings, "loader.workers=4", script=script)
            row[side] = {"ms": milliseconds(out), "MiB": mebibytes(out)}
            shutil.rmtree(out)  # a large model's checkpoints fill a disk
        yield row


def machine(part: Part, trainer: Trainer) -> Iterator[Row]:
    """A row for each fact about the machine: a text or a JSON value."""
    if shutil.which("nvidia-smi"):
        yield {"fact": "nvidia-smi", "value": subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout}
    printed = "\n".join(trainer.lines("env", "--set", f"device={trainer.device}"))
    try:
        yield {"fact": "samebits env", "value": json.loads(printed)}
    except ValueError:
        raise Failed(f"samebits env did not print what it should:\n{printed}") from None


def verify(part: Part, trainer: Trainer) -> Iterator[Row]:
    """A row for each way that `samebits verify` tries; one rank per card, and one on a CPU as if it were a card."""
    settings = f"device={trainer.device}", f"train.epochs={trainer.epochs}", "tracking.wait_seconds=5", ANYWHERE
    words = ["verify", *(word for setting in settings for word in ("--set", setting))]
    words += ["--ranks", "1"] if trainer.device == "cpu" else []
    said = []
    for line in trainer.lines(*words):
        said.append(line)
        if found := re.fullmatch(r"(.{30})  .{16}  .{16}  (.+)", line):
            yield {"way": found[1].rstrip(), "verdict": found[2]}
    if not said or not said[-1].startswith("EQUAL"):
        raise Failed("\n".join(["samebits verify did not end with EQUAL:", *said]))


MODES = {"eager": "false", "compiled": "true"}
CASES = {
    f"{model}-{precision}-{mode}": (
        f"model.name={model}",
        f"compute.precision={precision}",
        f"compute.compile={flag}",
    )
    for model, precision, (mode, flag) in product(("convnet", "transformer"), ("float32", "bfloat16"), MODES.items())
}
MANY = ("parallel.global_batch=256", "parallel.micro_batches=2", "train.epochs=6")
LARGE = (*MANY, "model.depth=8")
SIZES = {
    # as many parameters as GPT-2 small has in its 12 blocks, 85 million: perceptrons here are half as wide
    "full": {"transformer": (*MANY, "model.width=768", "model.depth=18")},
    "large": {"convnet": ("model.width=256", *LARGE), "transformer": ("model.width=1024", *LARGE)},
    "small": {"convnet": (), "transformer": ()},  # as released
}
SIDES = {
    "cost": {"strict": Side(), "relaxed": Side(("determinism.relax=[all]",))},
    "peer": {"project": Side(), "plain": Side(script="plain")},
}


def _pairs(kind: str, cases: Iterable[str], sizes: Iterable[str] = ("large", "small")) -> list[Part]:
    measured = f"{' against '.join(SIDES[kind])}: step time, peak memory"
    return [
        Part(f"{kind}-{size}-{case}", measured, pairs, CASES[case], settings, SIDES[kind])
        for size, case in product(sizes, cases)
        if (settings := SIZES[size].get(case.split("-")[0])) is not None
    ]


# In the order of what is to be known first.
PARTS = [
    Part("machine", "nvidia-smi, samebits env", machine),
    *(Part(f"bits-{case}", f"the same bits: {', '.join(WAYS)}", bits, CASES[case]) for case in CASES),
    Part("verify", "samebits verify; where mlflow is missing, its `tracked` uploads nothing", verify),
    *_pairs("peer", (case for case in CASES if case.endswith("eager")), SIZES),
    *_pairs("cost", CASES),
]
