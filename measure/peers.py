"""The peers: the project's own loop, in which each step is made as most people would write it.

train.py is left as it is, so model, samples, loss, optimizer and learning rate are the project's, or a recipe's. In
place of its Run stands a `Peer`; a peer is how the parts of a step are made. Only a plain script's pinned form uses a
part of the machinery, the switches.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from pace import Pace

Config = Any  # the project's, which is not there before the project is generated
PLAIN, ONE_BATCH = "plain", "one-batch"


@dataclass(frozen=True)
class Parts:
    """The parts of a step.

    Attributes:
        network: as it is to be called.
        batches: micro-batches, without end.
        backward: called with the loss of a micro-batch.
        clip: called with the largest length that gradients may have.
        unsynced: the context of a micro-batch after which no gradients are sent.
    """

    network: Any
    batches: Iterator[Any]
    backward: Callable[[Any], None]
    clip: Callable[[float], Any]
    unsynced: Callable[[], AbstractContextManager[Any]]


def world() -> tuple[int, int]:
    """Rank and number of processes."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ---- how each makes its parts: model, optimizer, dataset and samples per micro-batch are given

Make = Callable[[Any, Any, Any, int], Parts]


def plain(config: Config) -> Make:
    """DistributedDataParallel, DistributedSampler and DataLoader."""
    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    rank, ranks = world()
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(config.seed)

    def make(model: Any, optimizer: Any, dataset: Any, size: int) -> Parts:
        network = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
        network = torch.compile(network) if config.compute.compile else network
        sampler = DistributedSampler(dataset, ranks, rank, seed=config.seed)
        loader = DataLoader(
            dataset,
            size,
            sampler=sampler,
            drop_last=True,
            num_workers=config.loader.workers,
            persistent_workers=config.loader.workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

        def batches() -> Iterator[Any]:
            for epoch in itertools.count():
                sampler.set_epoch(epoch)
                yield from loader

        return Parts(
            network,
            batches(),
            lambda loss: loss.backward(),
            lambda longest: nn.utils.clip_grad_norm_(model.parameters(), longest),
            network.no_sync if ranks > 1 else nullcontext,
        )

    return make


def pinned(config: Config) -> Make:
    """The plain script with the project's switches: variables, deterministic flags, one thread."""
    from repro_project.repro.core.flags import apply

    apply(config.determinism)
    return plain(config)


def fabric(config: Config) -> Make:
    """Lightning Fabric, with what its Trainer's `deterministic=True` does."""
    import torch
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    _, ranks = world()
    torch.use_deterministic_algorithms(True)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(config.seed, workers=True)

    def make(model: Any, optimizer: Any, dataset: Any, size: int) -> Parts:
        network, wrapped = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(dataset, size, shuffle=True, drop_last=True))
        return Parts(
            network,
            itertools.chain.from_iterable(itertools.repeat(loader)),
            fabric.backward,
            lambda longest: fabric.clip_gradients(network, wrapped, max_norm=longest),
            lambda: fabric.no_backward_sync(network, enabled=ranks > 1),
        )

    return make


def accelerate(config: Config) -> Make:
    """Accelerate, with `set_seed(..., deterministic=True)`."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    set_seed(config.seed, deterministic=True)

    def make(model: Any, optimizer: Any, dataset: Any, size: int) -> Parts:
        loader = DataLoader(dataset, size, shuffle=True, drop_last=True)
        network, _, prepared = accelerator.prepare(model, optimizer, loader)
        return Parts(
            network,
            itertools.chain.from_iterable(itertools.repeat(prepared)),
            accelerator.backward,
            lambda longest: accelerator.clip_grad_norm_(network.parameters(), longest),
            lambda: accelerator.no_sync(network),
        )

    return make


PEERS: dict[str, Callable[[Config], Make]] = {
    PLAIN: plain,
    ONE_BATCH: plain,
    "pinned": pinned,
    "fabric": fabric,
    "accelerate": accelerate,
}


# ---- in place of the project's Run and Step


class Ended(Exception):
    """The last step is made. What the project does after it is not a step."""


class Peer:
    """A run whose steps are a peer's. It goes on until the pace ends it, or its last step."""

    def __init__(self, make: Make, config: Config, pace: Pace) -> None:
        import torch

        self._make, self._pace = make, pace
        self.share = config.parallel.micro_batches // world()[1]  # micro-batches of this process
        self._batch, self._micro_batches = config.parallel.global_batch, config.parallel.micro_batches
        self.bfloat16 = config.compute.precision == "bfloat16"
        on_card = config.device != "cpu" and torch.cuda.is_available()
        self.world = SimpleNamespace(device=torch.device("cuda" if on_card else "cpu"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is left to do."""

    def steps(
        self, model: Any, optimizer: Any, dataset: Any, epochs: int = 0, steps: int = 0, **more: Any
    ) -> Iterator["Step"]:
        """As many as the project's; `more` is for the machinery."""
        self.optimizer, self.parts = (
            optimizer,
            self._make(model, optimizer, dataset, self._batch // self._micro_batches),
        )
        for number in range(of := steps or math.ceil(epochs * len(dataset) / self._batch)):
            self._pace.begins()
            yield Step(self, number, of)
        self._pace.begins()
        raise Ended


def moved(batch: Any, device: Any) -> Any:
    """A tensor, or tensors in a sequence, on the device."""
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else [moved(each, device) for each in batch]


class Step:
    """What the loop asks a step for."""

    is_last = False

    def __init__(self, run: Peer, number: int, of: int) -> None:
        self._run, self.number, self.of = run, number, of

    def backward(self, compute: Callable[[Any, Any], Any]) -> Any:
        """Leave the mean gradient of the global batch; the loss of the last micro-batch."""
        import torch

        run, parts, device = self._run, self._run.parts, self._run.world.device
        run.optimizer.zero_grad()
        for micro in range(run.share):
            batch = moved(next(parts.batches), device)
            with nullcontext() if micro == run.share - 1 else parts.unsynced():
                with torch.autocast(device.type, torch.bfloat16) if run.bfloat16 else nullcontext():
                    loss = compute(parts.network, batch) / run.share
                parts.backward(loss)
        return loss

    def ends_epoch(self, every: int = 1) -> bool:
        """Nothing is evaluated."""
        return False

    def log(self, **metrics: Any) -> None:
        """Nothing is written."""


def train(name: str, settings: list[str], slower: float) -> None:
    """Train until the pace ends it."""
    from repro_project.config import Config
    from repro_project.repro.config.params import load

    if name == ONE_BATCH:  # each process makes its part of a global batch at once
        settings = [*settings, f"parallel.micro_batches={world()[1]}"]
    config = load(Config, Path("params.yaml"), settings)
    if name == "pinned":
        from repro_project.repro.core.flags import set_environment

        set_environment(config.determinism)  # before torch is imported
    pace = Pace(slower)
    from repro_project import train as project

    train_by(PEERS[name](config), config, pace, project)


def train_by(make: Make, config: Config, pace: Any, project: Any) -> None:
    """Run the project's own loop, its module `train`, with these parts in each step."""
    peer = Peer(make, config, pace)
    project.Run = lambda *given: peer
    project.clip_grad_norm_ = lambda parameters, longest: peer.parts.clip(longest)
    with suppress(Ended):
        project.train(config, Path("build", "nowhere"))
