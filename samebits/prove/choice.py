"""How a part of a run is trained again: on other ranks, with other loader workers, sharded in another way."""

import re
import resource
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.settings import Settings

SIZES = 1, 3, 2  # numbers of ranks; the last part, which the end of the run waits for, has fewer than the one before
SHARDS = "none", "optimizer", "full"
GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # control groups, and those of this process
# What holds their memory: folder, files of limit and use, and, of memory.stat, what can be had back; now, and before.
MEMORY = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Choice:
    """How a segment is trained."""

    ranks: int
    workers: int
    shard: str

    def __str__(self) -> str:
        ranks, workers = self.ranks, self.workers
        words = f"{ranks} rank{'s' * (ranks > 1)}, {workers} loader worker{'s' * (workers != 1)}"
        return f"{words}, parallel.shard={self.shard}"

    def keys(self) -> dict[str, Any]:
        """As keys of params.yaml."""
        return {"loader.workers": self.workers, "parallel.shard": self.shard, "parallel.replicas": 1}


def choices(number: int, config: Settings, own: Choice) -> list[Choice]:
    """How to train the segment of this number: otherwise than the run's `own` way, or in that one if it is refused."""
    parallel = config.parallel
    sizes = [size for size in SIZES if size <= min(parallel.micro_batches, places(config.device))]
    ranks = own.ranks if parallel.reduce == "ddp" else sizes[number % len(sizes)]
    shards = [*(shard for shard in SHARDS if shard != own.shard), own.shard]
    shard = shards[number % len(SHARDS)] if ranks > 1 and parallel.reduce == "tree" else "none"
    others = 2 if own.workers == 1 else 1  # few, for each of them loads torch
    workers = others if number % len(SIZES) == 0 else 0
    choice = Choice(ranks, workers, shard)
    return [*dict.fromkeys([choice, replace(choice, shard="none"), own])]


def gpus(device: str) -> int:
    """How many GPUs a run has here whose key `device` is this; 0 on a CPU."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def places(device: str) -> int:
    """How many ranks that hold as much memory as this process has held have room beside it; of GPUs, how many see it.

    At least one: where that is too many, the segment ends and says so.
    """
    if count := gpus(device):
        return count
    available = re.findall(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = [int(kilobytes) * 1024 for kilobytes in available] + left()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(1, min(free) // held)


def left() -> list[int]:
    """The bytes that each control group has left that this process is in, such as a container or a job of Slurm."""
    found = []
    for line in OWN.read_text().splitlines() if OWN.exists() else []:
        _, controllers, path = line.split(":", 2)
        for name in MEMORY.keys() & {*controllers.split(",")}:
            folder, *files, cached = MEMORY[name]
            for group in (Path(path), *Path(path).parents):
                place = GROUPS / folder / group.relative_to("/")
                with suppress(OSError, ValueError):  # none, or no limit
                    most, used = (int((place / file).read_text()) for file in files)
                    (back,) = re.findall(rf"^{cached} (\d+)", (place / "memory.stat").read_text(), re.MULTILINE)
                    found.append(most - used + int(back))
    return found
