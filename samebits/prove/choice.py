"""How a part of a run is trained again: on other ranks, with other loader workers, sharded in another way."""

from dataclasses import astuple, dataclass, replace
from typing import Any

from ..config.settings import Settings
from .room import places

SIZES = 1, 3, 2  # numbers of ranks; the last part, which the end of the run waits for, has fewer than the one before
SHARDS = "none", "full", "optimizer"


@dataclass(frozen=True)
class Choice:
    """How a segment is trained."""

    ranks: int
    workers: int
    shard: str

    def __str__(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> list[str]:
        ranks, workers = self.ranks, self.workers
        return [
            f"{ranks} rank{'s' * (ranks > 1)}",
            f"{workers} loader worker{'s' * (workers != 1)}",
            f"parallel.shard={self.shard}",
        ]

    def beside(self, own: "Choice") -> str:
        """In what it differs from another one."""
        fields = zip(self._words(), astuple(self), astuple(own), strict=True)
        return ", ".join(words for words, one, other in fields if one != other)

    def keys(self) -> dict[str, Any]:
        """As keys of params.yaml."""
        return {"loader.workers": self.workers, "parallel.shard": self.shard, "parallel.replicas": 1}


def choices(number: int, config: Settings, own: Choice) -> list[Choice]:
    """How to train the segment of this number: otherwise than the run's `own` way, or in that one if it is refused."""
    sizes = [size for size in SIZES if size <= min(config.parallel.micro_batches, places(config.device))]
    ranks = sizes[number % len(sizes)]
    shards = [*(shard for shard in SHARDS if shard != own.shard), own.shard]
    turn = number - 1 - number // len(SIZES)  # of the segments that several ranks train
    shard = shards[turn % len(SHARDS)] if ranks > 1 else "none"
    others = 2 if own.workers == 1 else 1  # few, for each of them loads torch
    # With workers also at the end of an epoch and of the run: what the loop has changed until then does not reach them.
    workers = 0 if own.workers and number % len(SIZES) == 0 else others
    choice = Choice(ranks, workers, shard)
    return [*dict.fromkeys([choice, replace(choice, shard="none"), own])]
