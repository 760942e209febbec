"""What the ways to share a model among ranks send and hold: the tables of docs/sharding.md.

    python tools/sharding.py

Bytes are those that the kernel counted on the loopback interface, so run it alone; two hosts are two of its network
namespaces, as root. Each way is a process group of its own, on one model; CPU, gloo, one thread per rank.
"""

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bake import ROOT, VENV
from harness import about, arguments, configured, prepared, table, within, write

RESULT = ROOT / "docs" / "sharding.md"
WIDTH, NARROW, BLOCKS = 2048, 1024, 24  # 100, or 25 million parameters
STEPS = 3  # the first one is not counted
# width, ranks, micro-batches of them all, and steps
SHARED = (
    *((WIDTH, ranks, micro_batches, STEPS) for ranks, micro_batches in ((2, 4), (4, 4), (2, 16))),
    *((NARROW, 1, micro_batches, STEPS + 32 // micro_batches) for micro_batches in (1, 2, 8, 32, 128)),
)
HOSTS, LOCAL = 2, 2  # hosts, and ranks of each
LINK = (
    *("netns add {0}", "netns add {1}", "-n {0} link add eth0 type veth peer name eth0 netns {1}"),
    *("-n {0} address add 10.77.0.1/24 dev eth0", "-n {1} address add 10.77.0.2/24 dev eth0"),
    *(f"-n {host} link set {name} up" for host in ("{0}", "{1}") for name in ("eth0", "lo")),
)
# way -> title, beside whom it stands, and bytes that a rank sends in a step for each parameter, times (R-1)/R
WAYS = {
    "ddp": ("plain PyTorch, DistributedDataParallel", "ddp", "8"),
    "fsdp": ("FSDP2", "fsdp", "12 P"),
    "none": ("`none`", "ddp", "8"),
    "optimizer": ("`optimizer`", "ddp", "8"),
    "full": ("`full`", "fsdp", "12 P"),
}
STOCK = ("ddp", "fsdp")
# glibc keeps most of what is freed for later, and how much differs from run to run; this gives large blocks back
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
# and that is how a project starts its processes
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


# ---- on each rank


def sent(interface: str = "lo") -> int:
    """Bytes that this machine has sent there: to itself, by default."""
    lines = map(str.split, Path("/proc/net/dev").read_text().splitlines())
    return sum(int(fields[9]) for fields in lines if fields[0] == f"{interface}:")


def measure(way: str, width: int, micro_batches: int, steps: int, levels: int) -> dict[str, float]:
    """Bytes per parameter that this host sends to itself, to others, and a rank holds; seconds of a step."""
    if levels == 1:  # as if no launcher had said which ranks share a host
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    config = configured("device=cpu", "parallel.timeout_seconds=300")
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from samebits.core import ranks as world
    from samebits.core.exact import clip_grad_norm_
    from samebits.core.state import State
    from samebits.core.summing import gradients_of

    shard = way if way not in STOCK else "none"
    size = {"micro_batches": micro_batches, "global_batch": micro_batches, "shard": shard}
    settings = config.parallel.model_copy(update=size)
    ranks = world.join("cpu", settings)
    torch.manual_seed(0)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(BLOCKS)))
    if way == "fsdp":
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
                gradients.add(loss_of(model, micro_batch))
            gradients.reduce()
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.zero_grad()
            for micro_batch in mine:
                if network is not model:
                    network.require_backward_grad_sync = micro_batch == mine[-1]
                (loss_of(network, micro_batch) / len(mine)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    if way not in STOCK:
        gradients: Any = gradients_of(State.of(model, optimizer, {}), settings, ranks, list(model))
    network: Any = nn.parallel.DistributedDataParallel(model) if way == "ddp" and ranks.size > 1 else model
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
    found = {"sent": here, "between": there, "held": held.item()}
    per_parameter = {name: number / (BLOCKS * width * width) for name, number in found.items()}
    return per_parameter | {"seconds": statistics.median(seconds[1:])}


def measure_levels(way: str, *numbers: int) -> list[dict[str, float]]:
    """What `measure` returns on one level, then on two, if there are, by the same processes: to start them is slow."""
    two = [] if way in STOCK else [measure(way, *numbers, 2)]
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(two))  # so that they meet anew
    return [measure(way, *numbers, 1), *two]


# ---- here


def run(project: Path, way: str, ranks: int, *numbers: int, kept: bool = False) -> dict[str, float]:
    """What `measure` returns, of so many ranks on this machine."""
    variables, torchrun = KEPT if kept else RETURNED, ranks if ranks > 1 else 0
    return within(project, measure, way, *numbers, 2, ranks=torchrun, variables=variables)


def on_hosts(project: Path, hosts: Sequence[str], way: str, width: int, steps: int) -> list[dict[str, float]]:
    """What `measure_levels` returns, of two ranks on each of these hosts."""
    ranks = [(host, local) for host in hosts for local in range(LOCAL)]
    launchers = [
        ["ip", "netns", "exec", host, "env", f"RANK={rank}", f"LOCAL_RANK={local}", str(VENV / "bin" / "python")]
        for rank, (host, local) in enumerate(ranks)
    ]
    place = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(LOCAL)}
    meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    given = way, width, len(ranks), steps
    return within(project, measure_levels, *given, variables=RETURNED | place | meeting, launchers=launchers)


def sharded(project: Path) -> Iterator[list[object]]:
    """What a rank sends and holds, beside stock PyTorch; alone, it has nothing to share."""
    for width, ranks, micro_batches, steps in SHARED:
        passes, ways = micro_batches // ranks, WAYS if ranks > 1 else ("ddp", "none")
        numbers = ranks, width, micro_batches, steps
        found = {way: run(project, way, *numbers) for way in ways}
        for way in ways:
            longer = steps + 8 // passes  # until the heap holds all that a step needs
            found[way]["seconds"] = run(project, way, *numbers[:-1], longer, kept=True)["seconds"]
        for way, one in found.items():
            title, beside, formula = WAYS[way]
            so = (ranks - 1) / ranks * int(formula.split()[0]) * (passes if "P" in formula else 1)
            ratios = (f"{one[key] / found[beside][key]:.2f}" for key in ("held", "seconds"))
            size = f"{BLOCKS * width * width / 1e6:.0f} M"
            counted = (f"{number:.1f}" for number in (so, one["sent"] / ranks, one["held"]))
            yield [title, size, ranks, passes, f"(R-1)/R · {formula}", *counted, *ratios]


def between(project: Path) -> Iterator[list[object]]:
    """What a host sends to itself and to another one."""
    with two_hosts() as names:
        for way, (title, *_) in WAYS.items():
            for levels, found in enumerate(on_hosts(project, names, way, NARROW, STEPS), 1):
                yield [title, levels, f"{found['sent']:.1f}", f"{found['between']:.1f}"]


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


HEAD = (
    "way | parameters | ranks R | micro-batches of each, and passes P | bytes sent per parameter, step and rank | so "
    "| counted | peak memory, bytes per parameter | beside stock | time beside stock"
)
BETWEEN_HEAD = (
    "way, 2 hosts of 2 ranks | levels | bytes per parameter and step within a host | from a host to the other"
)

TABLES = {"shared": (HEAD, sharded), "between": (BETWEEN_HEAD, between)}


def main() -> None:
    """Measure everything and write the tables into the document."""
    requested = arguments(__doc__, RESULT, TABLES)
    with prepared() as project:
        place, parts = about(), [TABLES[name] for name in requested.only]
        write(requested.out, place, *(table(head, rows(project)) for head, rows in parts))


if __name__ == "__main__":
    main()
