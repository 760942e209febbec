"""How many ranks have room on this host, beside this process."""

import re
import resource
from contextlib import suppress
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # control groups, and those of this process
# What holds their memory: folder, files of limit and use, and, of memory.stat, what can be had back; now, and before.
MEMORY = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


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
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(1, free() // held)


def free() -> int:
    """The bytes of memory that processes of this host can have, beside what they hold."""
    available = re.findall(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return min([int(kilobytes) * 1024 for kilobytes in available] + left())


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
