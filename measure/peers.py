"""The peers: the project's own loop, in which each step is made as most people would write it.

train.py is left as it is, so model, samples, loss, optimizer and learning rate are the starter's. In place of its Run
stands a `Peer`; a peer is how the parts of a step are made. Only a plain script's pinned form uses a
part of the library, the flags.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Config = Any  # the project's, which is not there before the project is generated
PLAIN, ONE_BATCH = "plain", "one-batch"


@dataclass(frozen=True)
class Parts:
    """The parts of a step, and of a checkpoint, whose place is [epoch, steps, steps of this epoch]."""

    network: Any
    loader: Any
    begin: Callable[[int], object]  # with the number of an epoch
    backward: Callable[[Any], object]  # with the loss of a micro-batch
    clip: Callable[[float], Any]  # with the largest length that gradients may have
    unsynced: Callable[[], AbstractContextManager[Any]]  # for a micro-batch after which no gradients are sent
    save: Callable[[Path, list[int]], object]  # with a path and the place
    load: Callable[[Path], list[int]]  # with the path; gives the place
    rest: Callable[[Any, int], Any] = lambda loader, steps: loader  # after so many batches: all, as most people have it

    def batches(self) -> Iterator[Any]:
        """Micro-batches, without end."""
        for epoch in itertools.count():
            self.begin(epoch)
            yield from self.loader


def world() -> tuple[int, int]:
    """Rank and number of processes."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ---- how each makes its parts: model, optimizer, dataset and samples per micro-batch are given

Make = Callable[[Any, Any, Any, int], Parts]


def plain(config: Config, **reproducible: Any) -> Make:
    """DistributedDataParallel under a launcher, DistributedSampler and DataLoader."""
    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    (rank, ranks), launched = world(), "RANK" in os.environ
    if launched:
        distributed.init_process_group("gloo")
    torch.manual_seed(config.seed)

    def make(model: Any, optimizer: Any, dataset: Any, size: int) -> Parts:
        network = nn.parallel.DistributedDataParallel(model) if launched else model
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
            **reproducible,
        )

        def save(path: Path, place: list[int]) -> None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "place": place}, path)

        def load(path: Path) -> list[int]:
            state = torch.load(path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return state["place"]

        return Parts(
            network,
            loader,
            sampler.set_epoch,
            lambda loss: loss.backward(),
            lambda longest: nn.utils.clip_grad_norm_(model.parameters(), longest),
            network.no_sync if ranks > 1 else nullcontext,
            save,
            load,
        )

    return make


def pinned(config: Config) -> Make:
    """The plain script with the project's flags: variables, deterministic flags, one thread."""
    from samebits.core.flags import apply

    apply(config.determinism)
    return plain(config)


def fabric(config: Config) -> Make:
    """Lightning Fabric: its seeds, also of workers, and what its Trainer's `deterministic=True` does."""
    import torch
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    _, ranks = world()
    torch.use_deterministic_algorithms(True)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if "RANK" in os.environ else "auto")
    fabric.launch()
    fabric.seed_everything(config.seed, workers=True)

    def make(model: Any, optimizer: Any, dataset: Any, size: int) -> Parts:
        network, wrapped = fabric.setup(model, optimizer)
        loader = DataLoader(dataset, size, shuffle=True, drop_last=True, num_workers=config.loader.workers)
        loader = fabric.setup_dataloaders(loader)
        state = {"model": network, "optimizer": wrapped}
        return Parts(
            network,
            loader,
            getattr(loader.sampler, "set_epoch", lambda epoch: None),
            fabric.backward,
            lambda longest: fabric.clip_gradients(network, wrapped, max_norm=longest),
            lambda: fabric.no_backward_sync(network, enabled=ranks > 1),
            lambda path, place: fabric.save(path, {**state, "place": place}),
            lambda path: fabric.load(path, state)["place"],
        )

    return make


def accelerate(config: Config) -> Make:
    """Accelerate: `set_seed(..., deterministic=True)`, its sampler that can be seeded, its way into an epoch."""
    from accelerate import Accelerator
    from accelerate.data_loader import skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(config.seed, deterministic=True)

    def make(model: Any, optimizer: Any, dataset: Any, size: int) -> Parts:
        loader = DataLoader(dataset, size, shuffle=True, drop_last=True, num_workers=config.loader.workers)
        network, _, loader = accelerator.prepare(model, optimizer, loader)

        def save(path: Path, place: list[int]) -> None:
            accelerator.save_state(f"{path}.state")
            path.write_text(json.dumps(place))

        def load(path: Path) -> list[int]:
            accelerator.load_state(f"{path}.state")
            return json.loads(path.read_text())

        return Parts(
            network,
            loader,
            loader.set_epoch,
            accelerator.backward,
            lambda longest: accelerator.clip_grad_norm_(network.parameters(), longest),
            lambda: accelerator.no_sync(network),
            save,
            load,
            skip_first_batches,
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

    def __init__(self, make: Make, config: Config, pace: Any) -> None:
        import torch

        self._make, self._pace, self.config = make, pace, config
        self.share = config.parallel.micro_batches // world()[1]  # micro-batches of this process
        self._batch, self._micro_batches = config.parallel.global_batch, config.parallel.micro_batches
        self.bfloat16 = config.compute.precision == "bfloat16"
        on_card = config.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_card else "cpu")

    def steps(
        self, model: Any, optimizer: Any, dataset: Any, epochs: int = 0, steps: int = 0, **more: Any
    ) -> Iterator["Step"]:
        """As many as the project's; `more` is for the library."""
        self.optimizer = optimizer
        self.parts = self._make(model, optimizer, dataset, self._batch // self._micro_batches)
        self.batches = self.parts.batches()
        route(model, self.parts.network)
        for number in range(of := steps or math.ceil(epochs * len(dataset) / self._batch)):
            self._pace.begins()
            yield Step(self, number, of)
        self._pace.begins()
        raise Ended


def moved(batch: Any, device: Any) -> Any:
    """A tensor, or tensors in a sequence, on the device."""
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else [moved(each, device) for each in batch]


def route(model: Any, network: Any) -> None:
    """Have the loop's calls of the model go through what a trainer has made of it."""
    if network is model:
        return
    its, is_inside = type(model), False

    def call(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal is_inside
        if self is not model or is_inside:
            return its.__call__(self, *given, **named)
        is_inside = True
        try:
            return network(*given, **named)
        finally:
            is_inside = False

    model.__class__ = type(its.__name__, (its,), {"__call__": call})


class Step:
    """What the loop asks a step for."""

    is_last = False

    def __init__(self, run: Peer, number: int, of: int) -> None:
        self._run, self.number, self.of = run, number, of

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of this process; then `.grad` holds the mean gradient of the global batch."""
        import torch

        run, parts, device = self._run, self._run.parts, self._run.device
        run.optimizer.zero_grad()
        for micro in range(run.share):
            batch = moved(next(run.batches), device)
            with (
                nullcontext() if micro == run.share - 1 else parts.unsynced(),
                torch.autocast(device.type, torch.bfloat16) if run.bfloat16 else nullcontext(),
            ):
                yield batch

    def backward(self, loss: Any) -> None:
        """The loss of the last micro-batch is the step's."""
        import torch

        run, self.loss = self._run, loss
        with torch.autocast(run.device.type, enabled=False):
            run.parts.backward(loss / run.share)

    def ends_epoch(self, every: int = 1) -> bool:
        """Nothing is evaluated."""
        return False

    def log(self, **metrics: Any) -> None:
        """Nothing is written."""


def train_by(make: Make, config: Config, pace: Any, project: Any) -> None:
    """Run the project's own loop, its module `train`, with these parts in each step."""
    peer = Peer(make, config, pace)
    # what its loop takes of the library
    project.sb = SimpleNamespace(clip_grad_norm_=lambda parameters, longest: peer.parts.clip(longest))
    with suppress(Ended):
        project.train(peer)
