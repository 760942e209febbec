"""Time and memory to enter an epoch in its middle: this template's order against torch's, in docs/order.md.

    python tools/order.py

Every measurement is a process of its own, so that its peak of memory is its own, too. Indices alone, then through a
DataLoader whose items are their own indices, so that nothing is measured but which, when and how they are seeded.
"""

import itertools
import re
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
from bake import ROOT
from harness import configured, in_turn, two_digits, within

RESULT = ROOT / "docs" / "order.md"
SIZES = {f"10^{exponent}": 10**exponent for exponent in (6, 7, 8, 9, 10)}
BATCH, MICRO_BATCHES = 64, 8
BATCHES = 200  # after the first one
ROUNDS = 3  # of which the median counts
TITLES = {"plan": "`Plan`", "torch": "`DistributedSampler`"}
BYTES = 48  # per sample, of torch.randperm(n).tolist() at its peak: the tensor's 8, the list's 8, 32 of an int


# ---- in a process of its own


def plan(samples: int, load: bool) -> Callable[[], Iterator[Any]]:
    """The template's batches from the middle of the first epoch on."""
    config, start = configured("device=cpu"), samples // BATCH // 2
    import torch

    from samebits.core import sampling
    from samebits.core.ranks import World

    stop, world, mine = start + BATCHES + 1, World(0, 1, torch.device("cpu")), range(MICRO_BATCHES)

    def begin() -> Iterator[Any]:
        made = sampling.Plan(samples, BATCH, MICRO_BATCHES, seed=0)
        if load:
            keys = sampling.MicroBatches(made, mine, start, stop)
            micro_batches = iter(sampling.Loading(config.options, world).loader(range(samples), keys))
        else:
            micro_batches = iter(sampling.MicroBatches(made, mine, start, stop))
        return (list(itertools.islice(micro_batches, MICRO_BATCHES)) for _ in itertools.count())

    return begin


def stock(samples: int, load: bool) -> Callable[[], Iterator[Any]]:
    """The batches of torch's sampler, of which those before the middle are drawn and dropped, but not loaded."""
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

    def begin() -> Iterator[Any]:
        dataset = range(samples)
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=0)
        batches = itertools.islice(BatchSampler(sampler, BATCH, drop_last=False), samples // BATCH // 2, None)
        return iter(DataLoader(dataset, batch_sampler=batches) if load else batches)

    return begin


def mebibytes(field: str, file: str = "/proc/self/status") -> float:
    """What the kernel says of memory, by default of this process's."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)
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


def rows(project: Path, requested: Namespace) -> Iterator[list[str]]:
    """The lines of the table."""
    for size, order in itertools.product(requested.only, TITLES):
        samples, title = SIZES[size], [size, TITLES[order]]
        needed = BYTES * samples / 2**30
        if order == "torch" and needed > mebibytes("MemAvailable", "/proc/meminfo") / 2**11:  # half of what is free
            yield [*title, f"not measured: needs about {needed:.0f} GiB", *[""] * 5]
            continue
        measured = partial(within, project, measure, order, samples)
        found = in_turn((False, True), measured, range(requested.rounds))
        ways, names = found.values(), ("first", "peak", "each")
        yield title + [two_digits(statistics.median(one[name] for one in way)) for name in names for way in ways]


HEAD = "samples | order | first batch, s | with loader | memory, MiB | with loader | ms per batch | with loader"


if __name__ == "__main__":
    harness.measure(__doc__, RESULT, (HEAD, rows), parts=SIZES, rounds=ROUNDS)
