"""Train a sharded model whose sums are as hard as can be; with a fault, one part of the exactness is broken.

    cutting.py <package> FAULT FOLDER KEY=VALUE …

Rank 0 writes FOLDER/weights.json: the digest of the weights.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, SAMPLES, ROWS, WIDTH = 3, 8, 5, 64


class Hard(torch.utils.data.Dataset[Tensor]):
    """A sample for each micro-batch: gradients, (ROWS, WIDTH), of which two cancel out, and the others are tiny."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        large = 2.0**5 * torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        return {0: large, 1: -large}.get(index, torch.rand(ROWS, WIDTH) * 2.0**-38)


class Table(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(ROWS, WIDTH)), nn.Parameter(torch.zeros(ROWS))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given[0]).sum() + (self.bias * given[0].mean(1)).sum()

    def get_extra_state(self) -> Any:
        return {"rows": ROWS, "half": torch.full((2,), 0.5)}

    def set_extra_state(self, state: Any) -> None:
        assert state["rows"] == ROWS and state["half"].tolist() == [0.5, 0.5]


def nothing(repro: Callable[[str], Any]) -> None:
    """No fault."""


def stock_norm(repro: Callable[[str], Any]) -> None:
    """A norm of the norms of shards."""
    exact = repro("exact")

    def norm(gradients: Any) -> Tensor:
        mine = torch.stack([exact._here(gradient).norm() for gradient in gradients])
        squares = mine.square().sum()
        torch.distributed.all_reduce(squares)
        return squares.double().sqrt()

    exact._norm = norm


def odd_cuts(repro: Callable[[str], Any]) -> None:
    """Shards that begin anywhere."""
    repro("shards").ALIGN = 4


def torch_clips(repro: Callable[[str], Any]) -> None:
    """The loop calls torch's function."""
    repro("exact").clip_grad_norm_ = torch.nn.utils.clip_grad_norm_


def missing_pass(repro: Callable[[str], Any]) -> None:
    """A rank with fewer micro-batches makes no empty pass."""
    full = repro("fsdp").Full
    micro_batches = full.micro_batches

    def fewer(self: Any, *rechecked: Any) -> Any:
        given = micro_batches(self, *rechecked)
        self._passes = len(self.leaves[self.world.rank])
        return given

    full.micro_batches = fewer


def main(package: str, fault: str, folder: Path, overrides: list[str]) -> None:
    """Train."""
    project = import_module("samebits.base.project").Project.at(Path.cwd())
    run_of, params, errors = (import_module(f"samebits.{name}") for name in ("run", "config.params", "core.errors"))
    config = params.load(import_module(f"{package}.config").Config, overrides=overrides)
    globals()[fault](lambda name: import_module(f"samebits.core.{name}"))
    clip = import_module("samebits.core.exact").clip_grad_norm_
    try:
        with run_of.Run(project, config, folder) as run:
            model = Table()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=2.0**-60, fused=True)
            for step in run.steps(model, optimizer, Hard(), steps=STEPS):
                for given in step:
                    step.backward(model(given))
                clip(model.parameters(), 2.0**-70)
                optimizer.step()
            run.finish()
    except errors.RunError as failure:
        failure.report()
        sys.exit(failure.exit_code)
    if run.world.is_main:
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        (folder / "weights.json").write_text(json.dumps(digest))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
