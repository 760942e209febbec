"""The peers: the same training as most people would write it. One loop; a peer is how its parts are made.

All take model, samples, loss, optimizer, rate and length of gradients from the project. Only a plain script's pinned
form uses a part of its machinery, the switches.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pace import Pace

Config = Any  # the project's, which is not there before the project is generated


@dataclass(frozen=True)
class Peer:
    """The parts of a training.

    Attributes:
        network, optimizer: as they are to be called.
        batches: micro-batches, without end.
        backward: called with the loss of a micro-batch.
        clip: called with the largest length that gradients may have.
        unsynced: the context of a micro-batch after which no gradients are sent.
    """

    network: Any
    optimizer: Any
    batches: Iterator[Any]
    backward: Callable[[Any], None]
    clip: Callable[[float], Any]
    unsynced: Callable[[], AbstractContextManager[Any]]


def world() -> tuple[int, int]:
    """Rank and number of processes."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def parts(config: Config) -> tuple[Any, Any, Any, int]:
    """Model, optimizer, dataset and samples per micro-batch."""
    import torch
    from repro_project import data
    from repro_project.model import build
    from repro_project.train import parameter_groups

    train_set, _ = data.load(config)
    model = build(config)
    optimizer = torch.optim.AdamW(parameter_groups(model, config.train.weight_decay), fused=True)
    return model, optimizer, train_set, config.parallel.global_batch // config.parallel.shards


def plain(config: Config) -> Peer:
    """DistributedDataParallel, DistributedSampler and DataLoader."""
    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    rank, ranks = world()
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(config.seed)
    model, optimizer, train_set, size = parts(config)
    network = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    sampler = DistributedSampler(train_set, ranks, rank, seed=config.seed)
    loader = DataLoader(train_set, size, sampler=sampler, drop_last=True)

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    return Peer(
        network,
        optimizer,
        batches(),
        lambda loss: loss.backward(),
        lambda longest: nn.utils.clip_grad_norm_(model.parameters(), longest),
        network.no_sync if ranks > 1 else nullcontext,
    )


def pinned(config: Config) -> Peer:
    """The plain script with the project's switches: variables, deterministic flags, one thread."""
    from repro_project.repro.machine.switches import apply

    apply(config.determinism)
    return plain(config)


def fabric(config: Config) -> Peer:
    """Lightning Fabric, with what its Trainer's `deterministic=True` does."""
    import torch
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    _, ranks = world()
    torch.use_deterministic_algorithms(True)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(config.seed, workers=True)
    model, optimizer, train_set, size = parts(config)
    network, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(train_set, size, shuffle=True, drop_last=True))
    return Peer(
        network,
        optimizer,
        itertools.chain.from_iterable(itertools.repeat(loader)),
        fabric.backward,
        lambda longest: fabric.clip_gradients(network, optimizer, max_norm=longest),
        lambda: fabric.no_backward_sync(network, enabled=ranks > 1),
    )


def accelerate(config: Config) -> Peer:
    """Accelerate, with `set_seed(..., deterministic=True)`."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    set_seed(config.seed, deterministic=True)
    model, optimizer, train_set, size = parts(config)
    loader = DataLoader(train_set, size, shuffle=True, drop_last=True)
    network, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return Peer(
        network,
        optimizer,
        itertools.chain.from_iterable(itertools.repeat(loader)),
        accelerator.backward,
        lambda longest: accelerator.clip_grad_norm_(network.parameters(), longest),
        lambda: accelerator.no_sync(network),
    )


PEERS: dict[str, Callable[[Config], Peer]] = {
    "plain": plain,
    "pinned": pinned,
    "fabric": fabric,
    "accelerate": accelerate,
}


def train(name: str, settings: list[str], slower: float) -> None:
    """Train until the pace ends it."""
    from repro_project.config import Config
    from repro_project.repro.asked.params import load

    config = load(Config, Path("params.yaml"), settings)
    if name == "pinned":
        from repro_project.repro.machine.switches import set_environment

        set_environment(config.determinism)  # before torch is imported
    pace = Pace(slower)
    from repro_project.train import learning_rate, shard_loss

    peer, asked = PEERS[name](config), config.train
    share = config.parallel.shards // world()[1]
    steps = asked.epochs * 1000  # more than are ever made
    for step in range(steps):
        pace.begins()
        peer.optimizer.zero_grad()
        for micro in range(share):
            with nullcontext() if micro == share - 1 else peer.unsynced():
                peer.backward(shard_loss(peer.network, next(peer.batches)) / share)
        peer.clip(asked.clip_norm)
        rate = learning_rate(step, steps, asked.learning_rate, asked.warmup, asked.decay)
        for group in peer.optimizer.param_groups:
            group["lr"] = rate
        peer.optimizer.step()
