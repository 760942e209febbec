"""What the ways to share a model among ranks send and hold: the tables of docs/sharding.md.

    python tools/sharding.py [--only sharded]

Bytes are those that the kernel counted on the loopback interface, so run it alone; two hosts are two of its network
namespaces, as root. Each way is a process group of its own, on one model; CPU, gloo, one thread per rank.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from about import about
from bake import ROOT, VENV, bake, in_venv, make_venv

RESULT = ROOT / "docs" / "sharding.md"
WIDTH, BLOCKS, STEPS = 2048, 24, 3  # 100 million parameters; the first step is not counted
SHARED = ((2, 4), (4, 4), (2, 16))  # ranks, and micro-batches of them all
NARROW, HELD = 1024, (1, 2, 8, 32, 128)  # 25 million parameters; micro-batches of one rank
HOSTS, LOCAL = 2, 2  # hosts, and ranks of each
LINK = (
    *("netns add {0}", "netns add {1}", "-n {0} link add eth0 type veth peer name eth0 netns {1}"),
    *("-n {0} address add 10.77.0.1/24 dev eth0", "-n {1} address add 10.77.0.2/24 dev eth0"),
    *(f"-n {host} link set {name} up" for host in ("{0}", "{1}") for name in ("eth0", "lo")),
)
# way -> (title, beside whom it stands, bytes sent by a rank in a step for each parameter, as a formula and as a
# function of ranks and passes)
SHARE = "(R-1)/R"
WAYS: dict[str, tuple[str, str, str, Callable[[int, int], float]]] = {
    "ddp": ("DistributedDataParallel", "ddp", f"{SHARE} · 8", lambda r, p: (r - 1) / r * 8),
    "fsdp": ("FSDP2", "fsdp", f"{SHARE} · 12 P", lambda r, p: (r - 1) / r * 12 * p),
    "none": ("`none`", "ddp", f"{SHARE} · 8", lambda r, p: (r - 1) / r * 8),
    "optimizer": ("`optimizer`", "ddp", f"{SHARE} · 8", lambda r, p: (r - 1) / r * 8),
    "full": ("`full`", "fsdp", f"{SHARE} · 12 P", lambda r, p: (r - 1) / r * 12 * p),
}
STOCK = ("plain", "ddp", "fsdp")
# glibc keeps most of what is freed for later, and how much differs from run to run; this gives large blocks back
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


# ---- on each rank, under torchrun


def sent(interface: str = "lo") -> int:
    """Bytes that this machine has sent there: to itself, by default."""
    lines = [
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(f"{interface}:")
    ]
    return sum(int(line.split()[9]) for line in lines)


def measure(way: str, width: int, micro_batches: int, steps: int) -> dict[str, Any] | None:
    """Bytes per step that this host sent to itself and to others, the largest memory of the ranks in bytes, and the
    seconds of a step; of the lead.
    """
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
    shard = way if way not in STOCK else "none"
    size = {"micro_batches": micro_batches, "global_batch": micro_batches, "shard": shard}
    settings = config.parallel.model_copy(update=size)
    ranks = world.join("cpu", settings)
    torch.manual_seed(0)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(BLOCKS)))
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in [*model, model]:
            fully_shard(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mine = range(micro_batches // ranks.size)  # of a stock way
    batch = torch.rand(micro_batches, 1, width)

    def loss_of(network: nn.Module, micro_batch: int) -> torch.Tensor:
        return network(batch[micro_batch]).square().mean()

    def step() -> None:
        if way not in STOCK:
            for micro_batch in gradients.micro_batches():
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

    if way not in STOCK:
        gradients: Any = gradients_of(model, settings, ranks, Optimizers(optimizer, model), list(model))
    network: Any = nn.parallel.DistributedDataParallel(model) if way == "ddp" else model
    seconds, before = [], {}
    for number in range(steps):
        ranks.sum(torch.zeros(1))
        if number == 1:
            before = {interface: sent(interface) for interface in ("lo", "eth0")}
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    ranks.sum(torch.zeros(1))
    here, there = ((sent(interface) - held) / (steps - 1) for interface, held in before.items())
    held = torch.tensor(1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base), dtype=torch.float64)
    ranks.largest(held)
    world.leave()
    found = {"sent": here, "between": there, "held": held.item(), "seconds": statistics.median(seconds[1:])}
    return found if ranks.leads else None


# ---- here


def run(project: Path, way: str, ranks: int, width: int, micro_batches: int, steps: int = STEPS) -> dict[str, Any]:
    """What the lead measured, on this machine alone."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    with tempfile.NamedTemporaryFile("r") as result:
        words = map(str, ("--way", way, result.name, width, micro_batches, steps))
        command = [str(VENV / "bin" / "python"), *(launcher if ranks > 1 else []), str(Path(__file__)), *words]
        subprocess.run(command, cwd=project, env=in_venv(project) | RETURNED, check=True)
        return json.loads(result.read())


def sharded(project: Path, width: int = WIDTH) -> list[str]:
    """The table of what a rank sends and holds, beside stock PyTorch."""
    parameters, lines = BLOCKS * width * width, [HEAD]
    for ranks, micro_batches in SHARED:
        passes = micro_batches // ranks
        found = {way: run(project, way, ranks, width, micro_batches) for way in WAYS}
        for way, (title, beside, formula, per_parameter) in WAYS.items():
            one, stock = found[way], found[beside]
            cells = (
                title, ranks, passes, formula, f"{per_parameter(ranks, passes):.1f}",
                f"{one['sent'] / ranks / parameters:.1f}", f"{one['held'] / parameters:.1f}",
                f"{one['held'] / stock['held']:.2f}", f"{one['seconds'] / stock['seconds']:.2f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def memory(project: Path, width: int = NARROW) -> list[str]:
    """The table of what one rank holds, and how long it takes, beside gradients that are accumulated in place."""
    parameters, lines = BLOCKS * width * width, [MEMORY_HEAD]
    for micro_batches in HELD:
        steps = STEPS + 32 // micro_batches
        plain, ours = (run(project, way, 1, width, micro_batches, steps) for way in ("plain", "none"))
        sets = max(1, micro_batches.bit_length() - 1)
        more = (ours["held"] - plain["held"]) / parameters
        peaks = (f"{number:.1f}" for number in (plain["held"] / parameters, ours["held"] / parameters, more))
        cells = micro_batches, sets, *peaks, 4 * (sets - 1), f"{ours['seconds'] / plain['seconds']:.2f}"
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def between(project: Path, width: int = NARROW) -> list[str]:
    """The table of what a host sends to itself and to another one."""
    lines = [BETWEEN_HEAD]
    with two_hosts() as names:
        for way, (title, *_) in WAYS.items():
            for levels in (1,) if way in STOCK else (1, 2):
                found = on_hosts(project, names, way, width, levels)
                counted = (f"{found[key] / (BLOCKS * width * width):.1f}" for key in ("sent", "between"))
                lines.append(f"| {title} | {levels} | {' | '.join(counted)} |")
    return lines


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two network namespaces with a cable between them."""
    names = [f"repro-{os.getpid()}-{host}" for host in range(HOSTS)]
    try:
        for words in LINK:
            subprocess.run(["ip", *words.format(*names).split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def on_hosts(project: Path, names: Sequence[str], way: str, width: int, levels: int) -> dict[str, Any]:
    """What the lead measured where each host is a network namespace."""
    env = in_venv(project) | RETURNED | {"GLOO_SOCKET_IFNAME": "eth0"}
    with tempfile.NamedTemporaryFile("r") as result, ExitStack() as stack:
        words = list(map(str, ("--way", way, result.name, width, HOSTS * LOCAL, STEPS, levels)))
        started = []
        for host, name in enumerate(names):
            nodes = [f"--nnodes={HOSTS}", f"--node-rank={host}", f"--nproc-per-node={LOCAL}"]
            launcher = ["-m", "torch.distributed.run", *nodes, "--master-addr=10.77.0.1", "--master-port=29500"]
            command = ["ip", "netns", "exec", name, str(VENV / "bin" / "python"), *launcher, __file__, *words]
            started.append(stack.enter_context(subprocess.Popen(command, cwd=project, env=env)))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"{way} on {HOSTS} hosts ended with an error")
        return json.loads(result.read())


HEAD = """| way | ranks R | micro-batches of each, and passes P | bytes sent per parameter, step and rank | so \
| counted | peak memory, bytes per parameter | beside stock | time beside stock |
|---|---|---|---|---|---|---|---|---|"""
MEMORY_HEAD = """| micro-batches | gradient sets that live | peak memory, bytes per parameter: accumulated in place \
| `none` | more | by formula | time beside |
|---|---|---|---|---|---|---|"""
BETWEEN_HEAD = """| way | levels | bytes per parameter and step that a host sends within itself | to the other one |
|---|---|---|---|"""
TABLES = {"sharded": sharded, "memory": memory, "between": between}


def main(only: Sequence[str]) -> None:
    """Measure everything, and write each table into its place in the document."""
    project = bake(ROOT / "build" / "sharding")
    make_venv(project)
    place = about()
    for name in only:
        table = "\n".join([f"<!-- measured {name} -->", place, "", *TABLES[name](project), "<!-- end -->"])
        marked = re.compile(rf"<!-- measured {name} -->.*?<!-- end -->", re.DOTALL)
        RESULT.write_text(marked.sub(lambda _, table=table: table, RESULT.read_text()))
        print(table, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=TABLES, help="this table alone; repeatable")
    parser.add_argument("--way", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.way:
        main(asked.only or list(TABLES))
    else:
        way, result, width, micro_batches, steps, *levels = asked.way
        if levels == ["1"]:  # as if no launcher had said which ranks share a host
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if measured := measure(way, int(width), int(micro_batches), int(steps)):
            Path(result).write_text(json.dumps(measured))
