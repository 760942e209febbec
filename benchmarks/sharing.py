"""`<package>.train` for ranks that share one card: they talk through gloo, because NCCL wants a card for each.

    torchrun ... benchmarks/sharing.py <package> ARGUMENTS-OF-TRAIN

Writes peak.json, the peak of allocated GPU memory in bytes, into the run directory.
"""

import json
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    package = sys.argv.pop(1)
    launch = import_module(f"{package}.repro.launch")
    config, out = launch.begin(import_module(f"{package}.config").Config)  # before torch is imported

    import torch
    import torch.distributed as dist

    init, gather = dist.init_process_group, dist.all_gather

    def through_gloo(backend: str, device_id: Any = None, **options: Any) -> None:
        init("gloo", **options)

    def on_the_host(results: list[torch.Tensor], tensor: torch.Tensor) -> None:  # gloo gathers no GPU tensors
        gathered = [result.cpu() for result in results]
        gather(gathered, tensor.cpu())
        for result, value in zip(results, gathered, strict=True):
            result.copy_(value)

    def first(device: str) -> torch.device:
        return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")

    dist.init_process_group, dist.all_gather = through_gloo, on_the_host
    import_module(f"{package}.repro.world").device_of = first
    launch.call(import_module(f"{package}.train").train, config, out)
    if config.device == "cuda":
        (out / "peak.json").write_text(json.dumps(torch.cuda.max_memory_allocated()))


if __name__ == "__main__":
    main()
