"""Time and memory to enter an epoch in its middle: this template's order against torch's, in docs/order.md.

    python tools/order.py

Every measurement is a process of its own, so that its peak of memory is its own, too. Indices alone, then through a
DataLoader whose items are their own indices, so that nothing is measured but which, when and how they are seeded.
"""

import argparse
import itertools
import json
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from about import about
from bake import NAME, ROOT, VENV, bake, in_venv, make_venv

PROJECT = ROOT / "build" / "order" / NAME
RESULT = ROOT / "docs" / "order.md"
SIZES = tuple(10**exponent for exponent in (6, 7, 8, 9, 10))
BATCH, MICRO_BATCHES = 64, 8
BATCHES = 200  # after the first one
REPEATS = 3  # processes, of which the median counts
TITLES = {"plan": "`Plan`", "torch": "`DistributedSampler`"}
BYTES = 48  # per sample, of torch.randperm(n).tolist() at its peak: the tensor's 8, the list's 8, 32 of an int


# ---- in a process of its own


class Indices:
    """A dataset of which nothing is stored."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Batches:
    """The batches of a sampler from one on, as a DataLoader wants them."""

    def __init__(self, sampler: Any, start: int) -> None:
        self.sampler, self.start = sampler, start

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.sampler, self.start, None)


def plan(samples: int, load: bool) -> Callable[[], Iterator[Any]]:
    """The template's batches from the middle of the first epoch on."""
    import torch
    from repro_project.config import Config
    from repro_project.repro.config.params import load as settings
    from repro_project.repro.core import sampling
    from repro_project.repro.core.ranks import World

    config, start = settings(Config, Path("params.yaml")), samples // BATCH // 2
    stop, world, mine = start + BATCHES + 1, World(0, 1, torch.device("cpu")), range(MICRO_BATCHES)

    def begin() -> Iterator[Any]:
        made = sampling.Plan(samples, BATCH, MICRO_BATCHES, seed=0)
        if load:
            micro_batches = iter(sampling.loader(Indices(samples), made, config, world, mine, start, stop))
        else:
            micro_batches = iter(sampling.MicroBatches(made, mine, start, stop))
        return (list(itertools.islice(micro_batches, MICRO_BATCHES)) for _ in itertools.count())

    return begin


def stock(samples: int, load: bool) -> Callable[[], Iterator[Any]]:
    """The batches of torch's sampler, of which those before the middle are drawn and dropped, but not loaded."""
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

    def begin() -> Iterator[Any]:
        dataset = Indices(samples)
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=0)
        batches = Batches(BatchSampler(sampler, BATCH, drop_last=False), samples // BATCH // 2)
        return iter(DataLoader(dataset, batch_sampler=batches) if load else batches)

    return begin


def mebibytes(field: str) -> float:
    """What the kernel says of this process's memory."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 2**10


def measure(order: str, samples: int, load: bool) -> dict[str, float]:
    """Seconds to the first batch, milliseconds for each later one, and the peak of memory above where it began."""
    begin = {"plan": plan, "torch": stock}[order](samples, load)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = mebibytes("VmRSS")
    times = [time.perf_counter()]
    batches = begin()
    for _ in range(BATCHES + 1):
        next(batches)
        times.append(time.perf_counter())
    later = [1000 * (end - start) for start, end in itertools.pairwise(times[1:])]
    return {"first": times[1] - times[0], "each": statistics.mean(later), "peak": mebibytes("VmHWM") - before}


# ---- here


def measured(order: str, samples: int, load: bool) -> dict[str, float]:
    """The medians of what processes of their own measured."""
    command = [VENV / "bin" / "python", __file__, "--measure", order, "--samples", str(samples)]
    command += ["--load"] if load else []
    told = [subprocess.check_output(command, cwd=PROJECT, env=environ()) for _ in range(REPEATS)]
    results = [json.loads(text) for text in told]
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def environ() -> dict[str, str]:
    return in_venv(PROJECT) | {"OMP_NUM_THREADS": "1"}


def available() -> float:
    """GiB of memory that processes can have."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 2**20


def rows() -> Iterator[str]:
    """The lines of the table."""
    for samples, order in itertools.product(SIZES, TITLES):
        title = f"10^{len(str(samples)) - 1} | {TITLES[order]}"
        needed = BYTES * samples / 2**30
        if order == "torch" and needed > available() / 2:
            yield f"| {title} | not measured: needs about {needed:.0f} GiB | | | | | |"
            continue
        ways = [measured(order, samples, load) for load in (False, True)]
        cells = [number(way[name]) for name in ("first", "peak", "each") for way in ways]
        yield f"| {title} | {' | '.join(cells)} |"


def number(value: float) -> str:
    """Two digits, and not a whole number's fewer."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def main() -> None:
    """Measure everything and write the document."""
    make_venv(bake(PROJECT.parent))
    place, lines = about(), []
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    facts = {"place": place, "batch": BATCH, "micro_batches": MICRO_BATCHES, "batches": BATCHES, "repeats": REPEATS}
    RESULT.write_text(DOCUMENT.format(rows="\n".join(lines), **facts))


DOCUMENT = """# The order of samples, at scale

Written by `make order`. {place}

From nothing to the batch of {batch} samples in the middle of an epoch, as a resumed run begins, and the {batches}
after it; alone, and through a DataLoader (no workers) whose items are their own indices.

| samples | order | first batch, s | with loader | memory, MiB | with loader | ms per batch | with loader |
|---|---|---:|---:|---:|---:|---:|---:|
{rows}

- `Plan` computes each position of a keyed permutation when it is asked for. `DistributedSampler` makes a list of all
  of them (`torch.randperm(n).tolist()`), on every rank, in every epoch, and cannot begin in the middle: the batches
  before it are drawn and dropped here, though their samples are not loaded.
- Each number is the median of {repeats} processes. Memory is the peak above what the process held once everything was
  imported; 0: no page more than Python had at hand. What needs more than half of the free memory is not measured.
  Where a machine has other work to do, differences within a factor of two say little.
- Without a list each position costs arithmetic, in the process that trains. `Plan` computes some thousand at once, in
  numpy, so the time per batch is the mean of all. A rank computes its own micro-batches' only; here one rank has all
  {micro_batches}. The price is not quite the same for all n: the network permutes a range of up to 2n, and a position
  that lands beyond n is walked on.
- With the loader, each of `Plan`'s samples is also seeded, for torch and for what else it draws from, so that worker
  counts change no bit; torch's order comes without that. Workers, where there are any, share that part.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=TITLES, help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.samples, arguments.load)))
    else:
        main()
