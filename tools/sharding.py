"""What the ways to share a model among ranks send and hold: the tables of docs/sharding.md.

    python tools/sharding.py

Bytes are those that the kernel counted on the loopback interface, so run it alone. Each way is a process group of its
own, on one model of 100 million parameters; CPU, gloo, one thread per rank.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from about import about
from bake import ROOT, VENV, bake, in_venv, make_venv

RESULT = ROOT / "docs" / "sharding.md"
WIDTH, BLOCKS, MICRO_BATCHES, STEPS = 2048, 24, 4, 3  # 100 million parameters; the first step is not counted
RANKS = (2, 4)
# way -> (title, bytes sent by a rank in a step for each parameter, as a formula and as a function of ranks and passes)
SHARE = "(R-1)/R"
WAYS: dict[str, tuple[str, str, Callable[[int, int], float]]] = {
    "ddp": ("DistributedDataParallel", f"{SHARE} · 8", lambda r, p: (r - 1) / r * 8),
    "fsdp": ("FSDP2", f"{SHARE} · 12 P", lambda r, p: (r - 1) / r * 12 * p),
    "none": ("`none`", f"{SHARE} · 16", lambda r, p: (r - 1) / r * 16),
    "optimizer": ("`optimizer`", f"{SHARE} · 12", lambda r, p: (r - 1) / r * 12),
    "full": ("`full`", f"{SHARE} · 16 P", lambda r, p: (r - 1) / r * 16 * p),
    "fsdp bfloat16": ("FSDP2, bfloat16", f"{SHARE} · 8 P", lambda r, p: (r - 1) / r * 8 * p),
    "full bfloat16": ("`full`, `gather: bfloat16`", f"{SHARE} · 12 P", lambda r, p: (r - 1) / r * 12 * p),
}
# glibc keeps most of what is freed for later, and how much differs from run to run; this gives large blocks back
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


# ---- on each rank, under torchrun


def sent() -> int:
    """Bytes that this machine has sent to itself."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])


def measure(way: str, width: int) -> dict[str, Any] | None:
    """Bytes per step and rank, the largest memory of the ranks in bytes, and the seconds of the steps; of the lead."""
    from repro_project.config import Config
    from repro_project.repro.asked.params import load
    from repro_project.repro.machine.switches import apply, set_environment

    config = load(Config, Path("params.yaml"), ["device=cpu", "parallel.timeout_seconds=300"])
    set_environment(config.determinism)  # before torch is imported
    import torch
    from repro_project.repro.training import world
    from repro_project.repro.training.exact import clip_grad_norm_
    from repro_project.repro.training.optimizers import Optimizers
    from repro_project.repro.training.summing import gradients_of
    from torch import nn

    apply(config.determinism)
    way, _, precision = way.partition(" ")
    ours = way not in ("ddp", "fsdp")
    parallel = config.parallel.model_copy(update={"micro_batches": MICRO_BATCHES, "global_batch": MICRO_BATCHES})
    asked = {"shard": way if ours else "none", "gather": precision or "float32"}
    ranks = world.join("cpu", parallel.model_copy(update=asked))
    torch.manual_seed(0)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(BLOCKS)))
    if way == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        short = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in [*model, model]:
            fully_shard(block, mp_policy=short if precision else MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mine = range(MICRO_BATCHES * ranks.rank // ranks.size, MICRO_BATCHES * (ranks.rank + 1) // ranks.size)
    batch = torch.rand(MICRO_BATCHES, 1, width)

    def loss_of(network: nn.Module, micro_batch: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(ours and precision)):
            return network(batch[micro_batch]).float().square().mean()

    def step() -> None:
        if ours:
            for micro_batch in gradients.micro_batches(mine):
                gradients.add(partial(loss_of, gradients.module, micro_batch))
            gradients.reduce()
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.zero_grad()
            for micro_batch in mine:
                if way == "ddp":
                    network.require_backward_grad_sync = micro_batch == mine[-1]
                (loss_of(network, micro_batch) / len(mine)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    if ours:
        settings = parallel.model_copy(update=asked)
        gradients: Any = gradients_of(model, settings, ranks, Optimizers(optimizer, model), list(model))
    network: Any = nn.parallel.DistributedDataParallel(model) if way == "ddp" else model
    seconds, before = [], 0
    for number in range(STEPS):
        ranks.sum(torch.zeros(1))
        if number == 1:
            before = sent()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    ranks.sum(torch.zeros(1))
    bytes_sent = (sent() - before) / (STEPS - 1) / ranks.size
    held = torch.tensor(1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base), dtype=torch.float64)
    ranks.largest(held)
    world.leave()
    return {"sent": bytes_sent, "held": held.item(), "seconds": statistics.median(seconds[1:])} if ranks.leads else None


# ---- here


def torchrun(way: str, ranks: int, project: Path) -> dict[str, Any]:
    """What the lead measured."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    with tempfile.NamedTemporaryFile("r") as result:
        command = [str(VENV / "bin" / "python"), *launcher, str(Path(__file__)), "--way", way, "--result", result.name]
        subprocess.run(command, cwd=project, env=in_venv(project) | RETURNED, check=True)
        return json.loads(result.read())


def main() -> None:
    """Measure everything and write the tables into the document."""
    project = bake(ROOT / "build" / "sharding")
    make_venv(project)
    place = about()
    parameters, lines = BLOCKS * WIDTH * WIDTH, []
    for ranks in RANKS:
        passes = -(-MICRO_BATCHES // ranks)
        found = {way: torchrun(way, ranks, project) for way in WAYS}
        for way, (title, formula, per_parameter) in WAYS.items():
            one, peer = found[way], found[" ".join(["fsdp", *way.split()[1:]])]
            cells = (
                title, ranks, passes, formula, f"{per_parameter(ranks, passes):.1f}", f"{one['sent'] / parameters:.1f}",
                f"{one['held'] / parameters:.1f}", f"{one['held'] / peer['held']:.2f}",
                f"{one['seconds'] / found['ddp']['seconds']:.2f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    table = "\n".join(["<!-- measured -->", place, "", HEAD, *lines, "<!-- end -->"])
    RESULT.write_text(re.sub(r"<!-- measured.*?<!-- end -->", lambda _: table, RESULT.read_text(), flags=re.DOTALL))
    print(table)


HEAD = """| way | ranks R | passes P | bytes sent per parameter, step and rank | so | counted | peak memory, bytes per \
parameter | beside FSDP2's | time beside DDP's |
|---|---|---|---|---|---|---|---|---|"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=WIDTH, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.way:
        main()
    elif measured := measure(asked.way, asked.width):
        asked.result.write_text(json.dumps(measured))
