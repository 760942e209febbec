"""`<package>.train` as the parts start it. All that they know of the package's modules stands here.

    python sharing.py PACKAGE ARGUMENTS-OF-TRAIN        one process, or each rank under torchrun

Several ranks share the first card and talk through gloo, because NCCL wants a card for each.
Writes peak.json, the peak of allocated GPU memory in bytes, into the run directory.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Train as the arguments ask."""
    package = sys.argv.pop(1)
    if several := int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os.environ["LOCAL_RANK"] = "0"  # which card a rank takes
    launch = import_module(f"{package}.repro.start.launch")
    project = import_module(package).PROJECT
    config, out = launch.begin(project, import_module(f"{package}.config").Config)  # before torch is imported

    import torch.distributed as dist

    init = dist.init_process_group

    def through_gloo(backend: str, device_id: Any = None, **options: Any) -> None:
        init("gloo", **options)

    if several:
        dist.init_process_group = through_gloo
    launch.call(project, import_module(f"{package}.train").train, config, out)
    write_peak(out)


def write_peak(out: Path) -> None:
    """Write the peak of this process's GPU memory into a run directory, where there is a GPU and this is the lead."""
    import torch

    if torch.cuda.is_initialized() and os.environ.get("RANK", "0") == "0":
        (out / "peak.json").write_text(json.dumps(torch.cuda.max_memory_allocated()))


if __name__ == "__main__":
    main()
