"""What peers keep of their bits, beside this project: a table in docs/stock.md.

    python measure/bits.py

The script is the one that most people write: a DataLoader, a sampler for each rank, a checkpoint of model and
optimizer. It trains the project's own network on the project's own data with the same global batch, on CPU with one
thread per process. `KINDS` says how its parts are made, each as the library's documents tell. The last column is
`repro verify` of a generated project.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import PEERS_VENV, ROOT, VENV, about, bake, in_venv, make_peers_venv, make_venv

RESULT = ROOT / "docs" / "stock.md"
EPOCHS, GLOBAL_BATCH, STOP = 2, 64, 30  # it is killed after STOP steps, in the middle of the second epoch

# (what differs from the first run, options of the script, variables, the way of `repro verify` that does the same)
ROWS: tuple[tuple[str, dict[str, int], dict[str, str], str], ...] = (
    ("the same again", {}, {}, "once more"),
    ("2 loader workers in place of none", {"workers": 2}, {}, "2 loader workers"),
    ("2 processes in place of one", {"ranks": 2}, {}, "2 ranks"),
    ("killed within an epoch and resumed", {"stop": STOP}, {}, "killed and resumed"),
    ("a CPU without AVX2", {}, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}, ""),
)


# ---- the script, under torchrun


@dataclass(frozen=True)
class Parts:
    """How a training is made.

    Attributes:
        model: as its weights are read at the end.
        network, optimizer, loader: as they are to be called.
        begin: called with the number of an epoch.
        backward: called with the loss.
        save: called with a path and the place, (epoch, steps, steps of this epoch).
        load: called with the path; gives the place.
        rest: what is left of a loader after so many steps; by default all of it, as most people have it.
    """

    model: Any
    network: Any
    optimizer: Any
    loader: Any
    begin: Callable[[int], object]
    backward: Callable[[Any], object]
    save: Callable[[Path, list[int]], object]
    load: Callable[[Path], list[int]]
    rest: Callable[[Any, int], Iterable[Any]] = lambda loader, steps: loader


def _made(config: Any) -> tuple[Any, Any, Any]:
    """Model, optimizer and dataset."""
    import torch
    from repro_project import data
    from repro_project.model import build

    model = build(config)
    return model, torch.optim.AdamW(model.parameters(), lr=0.004), data.load(config)[0]


def _torch(config: Any, ranks: int, workers: int, **reproducible: Any) -> Parts:
    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model, optimizer, train_set = _made(config)
    network = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(train_set, ranks, distributed.get_rank(), seed=0)

    def save(path: Path, place: list[int]) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "place": place}, path)

    def load(path: Path) -> list[int]:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        place: list[int] = state["place"]
        return place

    loader = DataLoader(train_set, GLOBAL_BATCH // ranks, sampler=sampler, num_workers=workers, **reproducible)
    return Parts(model, network, optimizer, loader, sampler.set_epoch, lambda loss: loss.backward(), save, load)


def seeded(config: Any, ranks: int, workers: int) -> Parts:
    """A plain script that seeds torch."""
    return _torch(config, ranks, workers)


def flags(config: Any, ranks: int, workers: int) -> Parts:
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
    return _torch(config, ranks, workers, worker_init_fn=seed_worker, generator=generator)


def fabric(config: Any, ranks: int, workers: int) -> Parts:
    """Lightning Fabric: its seeds, also of workers, and what its Trainer's `deterministic=True` does."""
    import torch
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    torch.use_deterministic_algorithms(True)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, workers=True)
    model, optimizer, train_set = _made(config)
    network, wrapped = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(train_set, GLOBAL_BATCH // ranks, shuffle=True, num_workers=workers))

    def begin(epoch: int) -> None:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)

    def save(path: Path, place: list[int]) -> None:
        fabric.save(path, {"model": network, "optimizer": wrapped, "place": place})

    def load(path: Path) -> list[int]:
        left = fabric.load(path, {"model": network, "optimizer": wrapped})
        place: list[int] = left["place"]
        return place

    return Parts(model, network, wrapped, loader, begin, fabric.backward, save, load)


def accelerate(config: Any, ranks: int, workers: int) -> Parts:
    """Accelerate: `set_seed(..., deterministic=True)`, its sampler that can be seeded, its way into an epoch."""
    import json

    from accelerate import Accelerator
    from accelerate.data_loader import skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0, deterministic=True)
    model, optimizer, train_set = _made(config)
    loader = DataLoader(train_set, GLOBAL_BATCH // ranks, shuffle=True, num_workers=workers)
    network, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def save(path: Path, place: list[int]) -> None:
        accelerator.save_state(f"{path}.state")
        path.write_text(json.dumps(place))

    def load(path: Path) -> list[int]:
        accelerator.load_state(f"{path}.state")
        place: list[int] = json.loads(path.read_text())
        return place

    return Parts(
        model, network, optimizer, loader, loader.set_epoch, accelerator.backward, save, load, skip_first_batches
    )


# name -> (title, how its parts are made, the environment)
KINDS: dict[str, tuple[str, Callable[[Any, int, int], Parts], Path]] = {
    "seeded": ("plain, seeded", seeded, VENV),
    "flags": ("plain, with every deterministic flag", flags, VENV),
    "fabric": ("Lightning Fabric, deterministic", fabric, PEERS_VENV),
    "accelerate": ("Accelerate, deterministic", accelerate, PEERS_VENV),
}


def script(kind: str, out: Path, workers: int, stop: int) -> None:
    """Train; with `stop`, end after so many steps, or go on from the checkpoint that is there."""
    from repro_project import PROJECT
    from repro_project.config import Config
    from repro_project.repro.config.params import load
    from torch import nn

    config = load(Config, PROJECT.root / "params.yaml")
    parts = KINDS[kind][1](config, int(os.environ["WORLD_SIZE"]), workers)
    checkpoint, (first, step, skipped) = out.with_suffix(".checkpoint"), [0, 0, 0]
    if checkpoint.exists():
        (first, step, skipped), stop = parts.load(checkpoint), 0
    for epoch in range(first, EPOCHS):
        parts.begin(epoch)
        done = skipped if epoch == first else 0
        for images, labels in parts.rest(parts.loader, done) if done else parts.loader:
            loss = nn.functional.cross_entropy(parts.network(images), labels)
            parts.optimizer.zero_grad()
            parts.backward(loss)
            parts.optimizer.step()
            step, done = step + 1, done + 1
            if step == stop:
                parts.save(checkpoint, [epoch, step, done])
                os._exit(0)
    if os.environ["RANK"] == "0":
        hasher = hashlib.sha256()
        for tensor in parts.model.state_dict().values():
            hasher.update(tensor.numpy().tobytes())
        out.write_text(hasher.hexdigest())
    os._exit(0)  # DistributedDataParallel may deadlock where it takes down the process group with Gloo


# ---- the table


def trained(project: Path, out: Path, kind: str, variables: dict[str, str], **options: int) -> str:
    """The SHA-256 of the weights that the script ends with."""
    ranks = str(options.pop("ranks", 1))
    chosen = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    command = [KINDS[kind][2] / "bin" / "python", *launcher, __file__, "--kind", kind, "--out", out, *chosen]
    env = in_venv(project) | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | variables
    for _ in range(1 + bool(options.get("stop"))):
        done = subprocess.run(list(map(str, command)), cwd=project, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{kind}: ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return out.read_text()


def verified(project: Path) -> dict[str, str]:
    """The verdict of each way of `repro verify`."""
    ways = [word for *_, way in ROWS if way for word in ("--only", way)]
    command = [VENV / "bin" / "python", "-m", "repro_project", "verify", *ways]
    printed = subprocess.run(command, cwd=project, env=in_venv(project), check=True, capture_output=True, text=True)
    return {line[:30].strip(): line.split()[-1] for line in printed.stdout.splitlines()}


def main() -> None:
    """Measure and write the table."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        project = bake(Path(folder))
        make_venv(project)
        make_peers_venv()
        place = about()
        prepare = [VENV / "bin" / "python", "-m", "repro_project.prepare"]
        subprocess.run(prepare, cwd=project, env=in_venv(project), check=True)
        first = {kind: trained(project, Path(folder, kind), kind, {}) for kind in KINDS}
        ours = verified(project)
        lines: list[str] = []
        for number, (name, options, variables, way) in enumerate(ROWS):
            cells = []
            for kind in KINDS:
                again = trained(project, Path(folder, f"{kind}-{number}"), kind, variables, **options)
                cells.append("equal" if again == first[kind] else "**differs**")
            lines.append(f"| {' | '.join([name, *cells, ours[way].lower() if way else 'refused by name'])} |")
            print(lines[-1], flush=True)
    titles = ["another run", *(title for title, *_ in KINDS.values()), "this project"]
    head = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"
    RESULT.write_text(DOCUMENT.format(place=place, table="\n".join([head, *lines])))


DOCUMENT = """# What plain PyTorch, Fabric and Accelerate keep of their bits

Written by `make stock`. {place}

The script trains the project's network on the project's data with DistributedDataParallel, on
CPU with one thread per process. For Lightning Fabric and Accelerate it is written as their documents say, with all that
they offer for it; Accelerate's `skip_first_batches` leads into the middle of an epoch. The last column is
`repro verify`. Each cell says whether the final weights are those of the first run: one process, no loader worker.

{table}

A CPU without AVX2 is played by `ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41`. The project refuses these
variables, because it promises equal bits on CPUs with AVX2; the tests train on such CPUs of several makers.
"""


if __name__ == "__main__":
    if "RANK" in os.environ:
        parser = argparse.ArgumentParser()
        parser.add_argument("--kind", required=True, choices=KINDS)
        parser.add_argument("--out", required=True, type=Path)
        parser.add_argument("--workers", type=int, default=0)
        parser.add_argument("--stop", type=int, default=0)
        script(**vars(parser.parse_args()))
    else:
        sys.exit(main())
