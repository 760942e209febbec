"""Samples per second of a run's loader beside a plain DataLoader, on two starters: a table in docs/loader.md.

    python tools/loader.py

Both load the same samples with the same transforms, in batches of the same size, in one process. They take turns, so
that whatever else the machine does hits both alike.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from timeit import repeat
from typing import Any

from bake import ROOT, venv_of
from harness import about, arguments, configured, in_turn, prepared, spread, table, within, write

RESULT = ROOT / "docs" / "loader.md"
STARTERS = "images", "language"
WORKERS = 0, 2, 4
SIZES = 8, 64  # samples per micro-batch
ROUNDS, SECONDS = 7, 1.5  # of which the first warms up; seconds of each loader in a round
KEYS = 4096
CALLS = 20_000


# ---- in the project


def measure(rounds: int, seconds: float, calls: int = CALLS) -> dict[str, Any]:
    """By workers and samples per micro-batch, both loaders' samples per second in each round; and the time of keys."""
    config = configured("device=cpu")
    import torch
    from repro_project import data

    from samebits.core import sampling
    from samebits.core.ranks import World

    dataset, _ = data.load(config)
    world = World(0, 1, torch.device("cpu"))

    def ours(size: int, workers: int) -> Iterator[Any]:
        settings = config.model_copy(update={"loader": config.loader.model_copy(update={"workers": workers})})
        plan = sampling.Plan(len(dataset), 8 * size, 8, seed=0)
        keys = sampling.MicroBatches(plan, range(8), 0, 10**6)
        return iter(sampling.Loading(settings.options, world).loader(dataset, keys))

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

    loaders = {"plain": plain, "ours": ours}
    rates = {
        f"{size} {workers}": in_turn(loaders, lambda of: rate(loaders[of](size, workers), size), range(rounds))  # noqa: B023
        for size, workers in itertools.product(SIZES, WORKERS)
    }
    plan, took = sampling.Plan(10**7, KEYS, 1, seed=0), []
    for step in range(20):
        begin = time.perf_counter()
        plan.keys_of(range(step, step + 1), range(1))
        took.append(time.perf_counter() - begin)
    return {"rates": rates, "keys": 1000 * statistics.median(took), "parts": parts(calls)}


def parts(calls: int) -> dict[str, float]:
    """The time of each thing that a run's loader does for a sample, in microseconds."""
    import numpy

    from samebits.core.generators import seeded
    from samebits.core.seeds import derive, seed_torch

    number = derive(0, "sample", 3, 7)
    timed: dict[str, Callable[[], object]] = {
        "to derive a seed": lambda: derive(0, "sample", 3, 7),
        "to seed torch's generator": lambda: seed_torch(number),
        "that and to see whether the item draws from another one": lambda: seeded(number, int),
        "to seed python's": lambda: random.seed(number),
        "to seed numpy's": lambda: numpy.random.seed(number % 2**32),
    }
    return {name: 1e6 / calls * statistics.median(repeat(call, number=calls, repeat=9)) for name, call in timed.items()}


# ---- here


def rows(name: str, rates: dict[str, dict[str, list[float]]]) -> Iterator[list[str]]:
    """The lines of the table on one starter; the first round has warmed up."""
    for case, found in rates.items():
        plain, ours = found["plain"][1:], found["ours"][1:]
        ratios = statistics.quantiles((one / other for one, other in zip(ours, plain, strict=True)), n=4)
        middles = (f"{statistics.median(rates):.0f}" for rates in (plain, ours))
        yield [name, *case.split(), *middles, spread(*ratios)]


HEAD = "starter | samples per batch | workers | `DataLoader` | a run's loader | ratio"
PARTS = """For one sample a run's loader takes, in microseconds: {}.
The keys of a batch of {} samples take {:.1f} ms in the main process."""


def main() -> None:
    """Measure the starters and write the table into the document."""
    requested, found, place = arguments(__doc__, RESULT, STARTERS, rounds=ROUNDS, seconds=SECONDS), {}, ""
    for name in requested.only:
        with prepared(name) as project:
            place = place or about()
            found[name] = within(project, measure, requested.rounds, requested.seconds, venv=venv_of(name))
    lines = table(HEAD, itertools.chain.from_iterable(rows(name, one["rates"]) for name, one in found.items()))
    last = found[requested.only[-1]]
    parts = "; ".join(f"{part} {took:.1f}" for part, took in last["parts"].items())
    write(requested.out, place, lines, PARTS.format(parts, KEYS, last["keys"]))


if __name__ == "__main__":
    main()
