"""A training as the parts start it: `<package>.train`, or a plain script on the same model, data and loop (peers.py).

    python sharing.py ours|plain PACKAGE ARGUMENTS-OF-TRAIN        one process; `ours`: or each rank under torchrun

All that the parts know of the package's modules stands here. Several ranks share the first card and talk through gloo,
because NCCL wants a card for each. Both leave peak.json, the peak of allocated GPU memory in bytes, in the run
directory; the plain script leaves what else is read of a run, the time at which each step ended.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def ours(package: str) -> None:
    """Train as the arguments ask."""
    if several := int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os.environ["LOCAL_RANK"] = "0"  # which card a rank takes
    front = import_module("samebits.front")
    project, given = front.Ours().project, front.train.make_context("train", sys.argv[1:]).params
    config, out = front.begin(project, given["overrides"], given["out"], trains=True), given["out"]  # before torch

    import torch.distributed as dist

    init = dist.init_process_group

    def through_gloo(backend: str, device_id: Any = None, **options: Any) -> None:
        init("gloo", **options)

    if several:
        dist.init_process_group = through_gloo
    front.call(project, front.STAGES["train"](project, import_module(f"{package}.train").train), config, out)
    write_peak(out)


class Noted:
    """In place of a pace: the time at which each step begins is that at which the one before has ended."""

    def __init__(self, out: Path) -> None:
        self._rows, self._steps = (out / "trace" / "rank0000.jsonl").open("w", buffering=1), 0

    def begins(self) -> None:
        """A step begins."""
        if self._steps:
            print(json.dumps({"monotonic": time.monotonic()}), file=self._rows)
        self._steps += 1


def plain(package: str) -> None:
    """Train as the arguments ask, as long as the project would."""
    import peers

    *words, _, out = sys.argv[1:]
    config: Any = import_module("samebits.config.params").load(
        import_module(f"{package}.config").Config, overrides=[word for word in words if word != "--set"]
    )
    (Path(out) / "trace").mkdir(parents=True)
    peers.train_by(peers.plain(config), config, Noted(Path(out)), import_module(f"{package}.train"))
    write_peak(Path(out))
    sys.stdout.flush()
    os._exit(0)  # workers of a loader that is not at its end would be waited for


def write_peak(out: Path) -> None:
    """Write the peak of this process's GPU memory into a run directory, where there is a GPU and this is rank 0."""
    import torch

    if torch.cuda.is_initialized() and os.environ.get("RANK", "0") == "0":
        (out / "peak.json").write_text(json.dumps(torch.cuda.max_memory_allocated()))


if __name__ == "__main__":
    train, package = {"ours": ours, "plain": plain}[sys.argv.pop(1)], sys.argv.pop(1)
    train(package)
