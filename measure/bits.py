"""What peers keep of their bits, beside this project: a table in docs/stock.md.

    python measure/bits.py

The script is the one that most people write: a DataLoader, a sampler for each rank, a checkpoint of model and
optimizer. It trains the project's own network on the project's own data with the same global batch, on CPU with one
thread per process. `peers.py` says how its parts are made, each as the library's documents tell. The last column is
`samebits verify` of a generated project.
"""

import hashlib
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

import peers
from rounds import PEERS_VENV, ROOT, VENV, harness, make_peers_venv

RESULT = ROOT / "docs" / "stock.md"
EPOCHS, GLOBAL_BATCH, STOP = 2, 64, 30  # it is killed after STOP steps, in the middle of the second epoch

# (what differs from the first run, ranks, workers, steps before the kill, variables, what `samebits verify` calls it)
ROWS: tuple[tuple[str, int, int, int, dict[str, str], str], ...] = (
    ("the same again", 1, 0, 0, {}, "once more"),
    ("2 loader workers in place of none", 1, 2, 0, {}, "2 loader workers"),
    ("2 processes in place of one", 2, 0, 0, {}, "2 ranks"),
    ("killed within an epoch and resumed", 1, 0, STOP, {}, "killed and resumed"),
    ("a CPU without AVX2", 1, 0, 0, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}, ""),
)


def flags(config: peers.Config) -> peers.Make:
    """A plain script with every flag that PyTorch's notes on reproducibility name."""
    import random

    import numpy
    import torch

    def seed_worker(worker: int) -> None:
        numpy.random.seed(torch.initial_seed() % 2**32)
        random.seed(torch.initial_seed())

    generator = torch.Generator()
    generator.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return peers.plain(config, worker_init_fn=seed_worker, generator=generator)


# title -> (how its parts are made, the environment)
KINDS = {
    "plain, seeded": (peers.plain, VENV),
    "plain, with every deterministic flag": (flags, VENV),
    "Lightning Fabric, deterministic": (peers.fabric, PEERS_VENV),
    "Accelerate, deterministic": (peers.accelerate, PEERS_VENV),
}
HEAD = " | ".join(["another run", *KINDS, "this project"])


def script(kind: str, workers: int, stop: int, file: str) -> None:
    """Train; with `stop`, end after so many steps, or go on from the checkpoint that is there. Leaves a digest."""
    from repro_project import data
    from repro_project.config import Config
    from repro_project.model import build

    from samebits.config.params import load

    config = load(Config, Path("params.yaml"), [f"loader.workers={workers}"])
    make = KINDS[kind][0](config)
    import torch

    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    parts = make(model, optimizer, data.load(config)[0], GLOBAL_BATCH // peers.world()[1])
    checkpoint, (first, step, skipped) = Path(file), [0, 0, 0]
    if checkpoint.exists():
        (first, step, skipped), stop = parts.load(checkpoint), 0
    for epoch in range(first, EPOCHS):
        parts.begin(epoch)
        done = skipped if epoch == first else 0
        for images, labels in parts.rest(parts.loader, done) if done else parts.loader:
            loss = torch.nn.functional.cross_entropy(parts.network(images), labels)
            optimizer.zero_grad()
            parts.backward(loss)
            optimizer.step()
            step, done = step + 1, done + 1
            if step == stop:
                parts.save(checkpoint, [epoch, step, done])
                harness.leave("")
                os._exit(0)
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.numpy().tobytes())
    harness.leave(hasher.hexdigest())
    os._exit(0)  # DistributedDataParallel may deadlock where it takes down the process group with Gloo


def trained(project: Path, kind: str, ranks: int, workers: int, stop: int, variables: Mapping[str, str]) -> str:
    """The SHA-256 of the weights that the script ends with."""
    given = kind, workers, stop, str(project / "build" / f"{kind}.checkpoint")
    variables, venv = harness.ONE_THREAD | {"PYTHONHASHSEED": "0"} | variables, KINDS[kind][1]
    found = [
        harness.within(project, script, *given, ranks=ranks, variables=variables, venv=venv)
        for _ in range(1 + bool(stop))
    ]
    return found[-1]


def rows(project: Path, requested: Namespace) -> Iterator[list[str]]:
    """The lines of the table."""
    make_peers_venv()
    first = {kind: trained(project, kind, 1, 0, 0, {}) for kind in KINDS}
    ways = [word for *_, way in ROWS if way for word in ("--only", way)]
    printed = harness.printed(project, "-m", "samebits", "verify", *ways)
    ours = {line[:30].strip(): line.split()[-1].lower() for line in printed.splitlines()} | {"": "refused by name"}
    for name, *options, way in ROWS:
        equal = [trained(project, kind, *options) == first[kind] for kind in KINDS]
        yield [name, *("equal" if each else "**differs**" for each in equal), ours[way]]


if __name__ == "__main__":
    harness.measure(__doc__, RESULT, (HEAD, rows))
