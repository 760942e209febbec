"""What a step gains where glibc's malloc keeps the memory of gradients: the table of docs/allocation.md.

python measure/allocation.py [--only wide] [--rounds N] [--out FILE]

Every round starts a process for each setting, so ratios are of pairs.
"""

import os
import resource
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median

from ratios import FEWEST, beside
from rounds import ROOT, harness
from sharding import KEPT

RESULT = ROOT / "docs" / "allocation.md"
STEPS = {"convnet": 150, "transformer": 20, "wide": 5}  # of a process
DEFAULTS, OURS = "glibc's defaults", "the project's"
SETTINGS: dict[str, dict[str, str]] = {
    DEFAULTS: {},
    "`MMAP_THRESHOLD` 32 MiB": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)},
    OURS: KEPT,
}
HEAD = "network, parameters | setting | ms per step | beside defaults | page faults per step | peak memory, MiB"


def step(network: str, steps: int) -> dict[str, float]:
    """Seconds and page faults of a step, the largest memory in MiB, and the number of parameters."""
    import torch
    from torch import nn

    def convolution(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]

    def used() -> resource.struct_rusage:
        return resource.getrusage(resource.RUSAGE_SELF)

    layers, sample = {
        "convnet": lambda: ([*convolution(1, 32), *convolution(32, 64), nn.Flatten(), nn.Linear(4096, 10)], (1, 8, 8)),
        "transformer": lambda: (
            [nn.TransformerEncoderLayer(288, 6, 1152, batch_first=True) for _ in range(4)],
            (16, 288),
        ),
        "wide": lambda: ([nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096)], (1024,)),
    }[network]()
    model, batch = nn.Sequential(*layers), torch.randn(8, 1, *sample)
    weights = list(model.parameters())
    optimizer, seconds, faults = torch.optim.AdamW(weights), list[float](), list[int]()
    for _ in range(3 + steps):  # the first ones warm up
        start, before = time.perf_counter(), used().ru_minflt
        nodes = []
        for number, micro_batch in enumerate(batch, start=1):
            model(micro_batch).square().mean().backward()
            nodes.append([weight.grad for weight in weights])
            optimizer.zero_grad()
            while number % 2 == 0:  # two neighbours are complete
                torch._foreach_add_(nodes[-2], nodes.pop())
                number //= 2
        for weight, gradient in zip(weights, nodes.pop(), strict=True):
            weight.grad = gradient
        del gradient
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        faults.append(used().ru_minflt - before)
    found = {"seconds": median(seconds[3:]), "faults": mean(faults[3:]), "peak": used().ru_maxrss / 1024}
    return found | {"parameters": sum(weight.numel() for weight in weights)}


def started(project: Path, network: str, setting: str) -> dict[str, float]:
    """What a process of its own measures, with this setting and no other one."""
    none = {name: None for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    return harness.within(
        project, step, network, STEPS[network], variables=none | harness.ONE_THREAD | SETTINGS[setting]
    )


def rows(project: Path, requested: Namespace) -> Iterator[list[str]]:
    """The lines of the table."""
    for network in requested.only:
        turns = harness.in_turn(SETTINGS, partial(started, project, network), range(requested.rounds))
        taken = {way: {key: [turn[key] for turn in of] for key in of[0]} for way, of in turns.items()}
        for way, one in taken.items():
            milliseconds, faults, peak = (median(one[key]) for key in ("seconds", "faults", "peak"))
            found = beside(one["seconds"], taken[DEFAULTS]["seconds"])
            title = f"{network}, {one['parameters'][0] / 1e6:.2g} M"
            yield [title, way, f"{1000 * milliseconds:.1f}", found, f"{faults:.0f}", f"{peak:.0f}"]


if __name__ == "__main__":
    harness.measure(__doc__, RESULT, (HEAD, rows), parts=STEPS, fewest=FEWEST, rounds=6)
