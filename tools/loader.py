"""Samples per second of a run's loader beside a plain DataLoader, on two recipes: a table in docs/loader.md.

    python tools/loader.py

Both load the same samples with the same transforms, in batches of the same size, in one process. They take turns, so
that whatever else the machine does hits both alike.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from timeit import repeat
from typing import Any

import recipe
from about import about
from bake import PACKAGE, ROOT, VENV, bake, in_venv, make_venv

FOLDER = ROOT / "build" / "loader"
RESULT = ROOT / "docs" / "loader.md"
RECIPES = "images", "language"
WORKERS = 0, 2, 4
SIZES = 8, 64  # samples per micro-batch
ROUNDS, SECONDS = 7, 1.5  # of which the first warms up; seconds of each loader in a round
KEYS = 4096
CALLS = 20_000


# ---- in the project


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """By workers and samples per micro-batch, both loaders' samples per second in each round; and the time of keys."""
    from repro_project.config import Config
    from repro_project.repro.config.params import load
    from repro_project.repro.core.flags import apply, set_environment

    config = load(Config, Path("params.yaml"), ["device=cpu"])
    set_environment(config.determinism)  # before torch is imported
    import torch
    from repro_project import data
    from repro_project.repro.core import sampling
    from repro_project.repro.core.ranks import World

    apply(config.determinism)
    dataset, _ = data.load(config)
    world = World(0, 1, torch.device("cpu"))

    def ours(size: int, workers: int) -> Iterator[Any]:
        settings = config.model_copy(update={"loader": config.loader.model_copy(update={"workers": workers})})
        plan = sampling.Plan(len(dataset), 8 * size, 8, seed=0)
        return iter(sampling.loader(dataset, plan, settings, world, range(8), 0, 10**6))

    def plain(size: int, workers: int) -> Iterator[Any]:
        def again() -> Iterator[int]:
            while True:
                yield from torch.randperm(len(dataset)).tolist()

        return iter(torch.utils.data.DataLoader(dataset, size, sampler=again(), num_workers=workers))

    def rate(loader: Iterator[Any], size: int) -> float:
        for _ in range(8):  # the first ones wait for the workers to begin
            next(loader)
        begin, count = time.perf_counter(), 0
        while (took := time.perf_counter() - begin) < seconds:
            next(loader)
            count += size
        return count / took

    def pair(turn: int, size: int, workers: int) -> list[float]:
        if turn % 2:
            return [rate(ours(size, workers), size), rate(plain(size, workers), size)]
        return [rate(plain(size, workers), size), rate(ours(size, workers), size)][::-1]

    rates = {
        f"{size} {workers}": [pair(turn, size, workers) for turn in range(rounds)][1:]
        for size, workers in itertools.product(SIZES, WORKERS)
    }
    plan, took = sampling.Plan(10**7, KEYS, 1, seed=0), []
    for step in range(20):
        begin = time.perf_counter()
        plan.keys_of(range(step, step + 1), range(1))
        took.append(time.perf_counter() - begin)
    return {"rates": rates, "keys": 1000 * statistics.median(took), "parts": parts()}


def parts() -> dict[str, float]:
    """The time of each thing that a run's loader does for a sample, in microseconds."""
    import numpy
    from repro_project.repro.core.generators import seeded
    from repro_project.repro.core.seeds import derive, seed_torch

    number = derive(0, "sample", 3, 7)
    timed: dict[str, Callable[[], object]] = {
        "to derive a seed": lambda: derive(0, "sample", 3, 7),
        "to seed torch's generator": lambda: seed_torch(number),
        "that and to see whether the item draws from another one": lambda: seeded(number, int),
        "to seed python's": lambda: random.seed(number),
        "to seed numpy's": lambda: numpy.random.seed(number % 2**32),
    }
    return {name: 1e6 / CALLS * statistics.median(repeat(call, number=CALLS, repeat=9)) for name, call in timed.items()}


# ---- here


def rows(name: str, measured: dict[str, Any]) -> list[str]:
    """The lines of the table on one recipe."""
    lines = []
    for case, pairs in measured["rates"].items():
        size, workers = case.split()
        low, middle, high = statistics.quantiles([one / other for one, other in pairs], n=4)
        cells = (
            name, size, workers, f"{statistics.median(other for _, other in pairs):.0f}",
            f"{statistics.median(one for one, _ in pairs):.0f}", f"{middle:.2f} ({low:.2f} … {high:.2f})",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure both recipes and write the document."""
    place, lines = "", []
    for name in RECIPES:
        project = bake(FOLDER / name)
        make_venv(project)  # none of the two loads a package that its recipe adds
        recipe.lay(name, project)
        place = place or about()
        env = in_venv(project)
        python = str(VENV / "bin" / "python")
        subprocess.run(
            [python, "-m", f"{PACKAGE}.prepare"], cwd=project, env=env, check=True, stdout=subprocess.DEVNULL
        )
        command = [python, str(Path(__file__)), "--measure"]
        measured = json.loads(subprocess.run(command, cwd=project, env=env, check=True, stdout=subprocess.PIPE).stdout)
        lines += rows(name, measured)
    RESULT.write_text(
        DOCUMENT.format(
            rows="\n".join(lines),
            place=place,
            many=KEYS,
            keys=measured["keys"],
            parts="; ".join(f"{name} {took:.1f}" for name, took in measured["parts"].items()),
        )
    )
    print(RESULT.read_text())


DOCUMENT = """# A run's loader beside a plain DataLoader

Written by `make loader`. {place}

Samples per second, medians; the ratio is that of pairs measured one after the other, with its quartiles.

| recipe | samples per batch | workers | `DataLoader` | a run's loader | ratio |
|---|---|---|---|---|---|
{rows}

- Both load the same items with the same transforms. A run's loader also derives a seed for each sample, seeds the
  generators that the transforms draw from, and looks at the files that they open.
- For one sample it takes, in microseconds: {parts}. Python's and numpy's generators are seeded only for items that
  draw from them, as the images do. So a run's loader is slower by more than 5 % where an item is made in less than
  twenty times the sum.
- The keys of a batch of {many} samples take {keys:.1f} ms in the main process.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.rounds, arguments.seconds)))
    else:
        main()
