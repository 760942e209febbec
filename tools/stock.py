"""What a plain PyTorch script keeps of its bits, beside this project: a table in docs/stock.md.

    python tools/stock.py

The script is the one that most people write: DistributedDataParallel, DistributedSampler, a DataLoader, a checkpoint of
model and optimizer. It trains the project's own network on the project's own data with the same global batch, on CPU
with one thread per process. Column 1 seeds it; column 2 also sets every flag that PyTorch's notes on reproducibility
name. Column 3 is `repro verify` of a generated project.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bake import ROOT, VENV, bake, in_venv

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


# ---- the plain script, under torchrun


def script(out: str, flags: bool, workers: int, stop: int) -> None:
    """Train; with `stop`, end after so many steps, or go on from the checkpoint that is there."""
    import random

    import numpy
    import torch
    from repro_project import PROJECT, data
    from repro_project.config import Config
    from repro_project.model import build
    from repro_project.repro.asked.params import load
    from torch import distributed, nn
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    def seed_worker(worker: int) -> None:
        numpy.random.seed(torch.initial_seed() % 2**32)
        random.seed(torch.initial_seed())

    config = load(Config, PROJECT.root / "params.yaml")
    torch.manual_seed(0)
    generator = torch.Generator()
    generator.manual_seed(0)
    if flags:
        random.seed(0)
        numpy.random.seed(0)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    train_set, _ = data.load(config)
    model = nn.parallel.DistributedDataParallel(build(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
    sampler = DistributedSampler(train_set, ranks, rank, seed=0)
    reproducible = {"worker_init_fn": seed_worker, "generator": generator} if flags else {}
    loader = DataLoader(train_set, GLOBAL_BATCH // ranks, sampler=sampler, num_workers=workers, **reproducible)
    checkpoint, first, step = Path(f"{out}.checkpoint"), 0, 0
    if checkpoint.is_file():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, step, stop = state["epoch"], state["step"], 0
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == stop:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
                torch.save(state, checkpoint)
                os._exit(0)
    if rank == 0:
        hasher = hashlib.sha256()
        for tensor in model.module.state_dict().values():
            hasher.update(tensor.numpy().tobytes())
        Path(out).write_text(hasher.hexdigest())
    os._exit(0)  # DistributedDataParallel may deadlock where it takes down the process group with Gloo


# ---- the table


def trained(project: Path, out: Path, flags: bool, variables: dict[str, str], **options: int) -> str:
    """The SHA-256 of the weights that the script ends with."""
    ranks = str(options.pop("ranks", 1))
    chosen = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    command = [VENV / "bin" / "python", *launcher, __file__, "--out", out, *(["--flags"] if flags else []), *chosen]
    env = in_venv(project) | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | variables
    for _ in range(1 + bool(options.get("stop"))):
        subprocess.run(list(map(str, command)), cwd=project, env=env, check=True, capture_output=True)
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
        subprocess.run([VENV / "bin" / "python", "-m", "repro_project.prepare"], cwd=project, env=in_venv(project),
                       check=True)  # fmt: skip
        ours = verified(project)
        first = {flags: trained(project, Path(folder, f"first-{flags}"), flags, {}) for flags in (False, True)}
        lines: list[str] = []
        for number, (name, options, variables, way) in enumerate(ROWS):
            cells = []
            for flags in (False, True):
                again = trained(project, Path(folder, f"{number}-{flags}"), flags, variables, **options)
                cells.append("equal" if again == first[flags] else "**differs**")
            cells.append(ours[way].lower() if way else "refused by name")
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    RESULT.write_text(DOCUMENT.format(rows="\n".join(lines)))


DOCUMENT = """# A plain script and its bits

Written by `make stock`. The script trains the project's network on the project's data with DistributedDataParallel,
DistributedSampler and DataLoader, on CPU with one thread per process; the last column is `repro verify`. Each cell says
whether the final weights are those of the first run: one process, no loader worker.

| another run | plain, seeded | plain, with every deterministic flag | this project |
|---|---|---|---|
{rows}

A CPU without AVX2 is played by `ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41`. The project refuses these
variables, because it promises equal bits on CPUs with AVX2; the tests train on such CPUs of several makers.
"""


if __name__ == "__main__":
    if "RANK" in os.environ:
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", required=True)
        parser.add_argument("--flags", action="store_true")
        parser.add_argument("--workers", type=int, default=0)
        parser.add_argument("--stop", type=int, default=0)
        script(**vars(parser.parse_args()))
    else:
        sys.exit(main())
