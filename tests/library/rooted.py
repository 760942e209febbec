"""A stage of two ranks whose model calls an operation that is not portable: python rooted.py PREPARED OUT."""

import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from samebits import run as run_module
from samebits.base.project import Project
from samebits.config import params
from samebits.guards import stages

PREPARED, OUT = map(Path, sys.argv[1:])
(PACKAGE,) = [path.parent.name for path in Path("src").glob("*/train.py")]
config = import_module(f"{PACKAGE}.config")


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Samples of four numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(4)


class Rooted(nn.Module):
    """On one rank alone it calls the operation: micro-batches of the others take another way."""

    def forward(self, x: Tensor) -> Tensor:
        """(n, 4) to (n, 4)."""
        return torch.atan(x) if RANK else x


requested = params.load(
    config.Config, overrides=[f"data.prepared={PREPARED}", "tracking.enabled=false", "loader.workers=0"]
)
stages.require_installed = stages.require_still = lambda *_: None
with run_module.Run(Project.at(Path.cwd()), requested, OUT) as run:
    RANK = run.world.rank
    model = nn.Sequential(nn.Linear(4, 4), Rooted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(model, optimizer, Numbers(), steps=2):
        for batch in step:
            step.backward(model(batch).square().mean())
        optimizer.step()
    run.finish()
