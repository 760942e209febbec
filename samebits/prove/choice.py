"""How a part of a run is trained again: on other ranks, with other loader workers, sharded in another way."""

from dataclasses import dataclass, replace
from typing import Any

from ..config.settings import Settings
from .room import places

SIZES = 1, 3, 2  # numbers of ranks; the last part, which the end of the run waits for, has fewer than the one before
SHARDS = "none", "optimizer", "full"


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
