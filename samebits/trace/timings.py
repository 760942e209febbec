"""How long a rank took for each phase of a step: a line of JSON per step. It differs between ranks by nature."""

import json
import resource
import socket
import time
from pathlib import Path
from typing import Any

import torch

PHASES = ("load", "compute", "update")  # of a step, in this order


class Timings:
    """Marks the end of each phase and writes a line per step into a file of this rank's own."""

    def __init__(self, path: Path, rank: int, device: torch.device) -> None:
        self._file, self._rank, self._device = path.open("a", buffering=1), rank, device
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._marks = [time.monotonic()]

    def ends(self, phase: str) -> None:
        """A phase ends; only its first end counts, for it is told once per micro-batch."""
        if len(self._marks) == PHASES.index(phase) + 1:
            self._marks.append(time.monotonic())

    def write(self, step: int, **more: Any) -> None:
        """End the last phase and write the line of the step: seconds are of the monotonic clock, memory is in bytes."""
        self.ends(PHASES[-1])
        pairs = zip(PHASES, self._marks, self._marks[1:], strict=False)
        row = {"step": step, "rank": self._rank, "host": socket.gethostname(), "monotonic": self._marks[-1]}
        row["seconds"] = {phase: round(end - start, 6) for phase, start, end in pairs}
        row["memory"] = most_memory(self._device)
        self._file.write(json.dumps(row | more) + "\n")


def most_memory(device: torch.device) -> int:
    """The most memory that this process has held so far, in bytes: tensors on a GPU, or all that is resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
