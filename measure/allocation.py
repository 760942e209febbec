"""What a step gains where glibc's malloc keeps the memory of gradients: the table of docs/allocation.md.

python measure/allocation.py [--only wide] [--rounds N] [--out FILE]

Every round starts a process for each setting, so ratios are of pairs.
"""

import json
import os
import subprocess
from pathlib import Path
from statistics import median

from document import arguments, write
from ratios import ratio
from rounds import ROOT, VENV, about, bake, make_venv
from sharding import KEPT

RESULT = ROOT / "docs" / "allocation.md"
STEPS = {"convnet": 150, "transformer": 20, "wide": 5}  # of a process
DEFAULTS, OURS = "glibc's defaults", "the project's"
SETTINGS: dict[str, dict[str, str]] = {
    DEFAULTS: {},
    "`MMAP_THRESHOLD` 32 MiB": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)},
    OURS: KEPT,
}
HEAD = """| network, parameters | setting | ms per step | beside defaults | page faults per step | peak memory, MiB |
|---|---|---|---|---|---|"""
STEP = """
import json, resource, statistics, sys, time, torch
from torch import nn
name, steps = sys.argv[1], int(sys.argv[2])
convolution = lambda i, o: [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
layers, sample = {
    "convnet": lambda: ([*convolution(1, 32), *convolution(32, 64), nn.Flatten(), nn.Linear(4096, 10)], (1, 8, 8)),
    "transformer": lambda: ([nn.TransformerEncoderLayer(288, 6, 1152, batch_first=True) for _ in range(4)], (16, 288)),
    "wide": lambda: ([nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096)], (1024,)),
}[name]()
model, batch = nn.Sequential(*layers), torch.randn(8, 1, *sample)
weights = list(model.parameters())
optimizer, seconds, faults = torch.optim.AdamW(weights), [], []
for _ in range(3 + steps):  # the first ones warm up
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    nodes = []
    for number, micro_batch in enumerate(batch, start=1):
        model(micro_batch).square().mean().backward()
        nodes.append([weight.grad for weight in weights])
        optimizer.zero_grad()
        while number % 2 == 0:  # two neighbours are complete
            torch._foreach_add_(nodes[-2], nodes.pop())
            number //= 2
    for weight, gradient in zip(weights, nodes.pop()):
        weight.grad = gradient
    del gradient
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - start)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps({
    "seconds": statistics.median(seconds[3:]), "faults": statistics.mean(faults[3:]),
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "parameters": sum(w.numel() for w in weights),
}))
"""


def started(python: Path, network: str, setting: str) -> dict[str, float]:
    """What a process of its own measures: seconds and page faults of a step, and its largest memory in MiB."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    env = kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | SETTINGS[setting]
    command = [python, "-c", STEP, network, str(STEPS[network])]
    return json.loads(subprocess.run(command, env=env, check=True, text=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    """Measure, and write the table into the document."""
    asked = arguments(__doc__, STEPS, RESULT)
    make_venv(bake(ROOT / "build" / "allocation"))
    lines = [f"{about()} {asked.rounds} rounds.", "", HEAD]
    for network in asked.only or STEPS:
        turns = [{way: started(VENV / "bin" / "python", network, way) for way in SETTINGS} for _ in range(asked.rounds)]
        taken = {way: {key: [turn[way][key] for turn in turns] for key in turns[0][way]} for way in SETTINGS}
        for way, one in taken.items():
            beside = str(ratio(one["seconds"], taken[DEFAULTS]["seconds"])) if way != DEFAULTS else "1"
            milliseconds, faults, peak = (median(one[key]) for key in ("seconds", "faults", "peak"))
            cells = f"{1000 * milliseconds:.1f}", beside, f"{faults:.0f}", f"{peak:.0f}"
            lines.append(f"| {network}, {one['parameters'][0] / 1e6:.2g} M | {way} | {' | '.join(cells)} |")
    write(asked.out, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
