"""Evaluation that changes nothing of the training around it, and gives the same numbers on any number of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from .batch import on_device
from .generators import preserved
from .plan import Indexed
from .ranks import World
from .sampling import Seeded
from .seeds import derive, seed_everything


@contextmanager
def evaluating(
    model: nn.Module, dataset: Indexed, batch: int, seed: int, world: World
) -> Iterator[Iterator[tuple[int, Any]]]:
    """Give this rank's part of `dataset`: pairs of a batch's number and the batch, on the device.

    The dataset is cut into the same batches of at most `batch` samples on any world size, and the ranks take turns. So
    let each batch fill a slot of its own, and sum the slots over the ranks at the end. The model is in evaluation mode
    and without gradients inside. Transforms and modules may draw: each sample and each batch is seeded, from `seed`.

    After it every module is in the mode that it had, a frozen one too, and the generators go on where they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with preserved(), torch.no_grad():
            batches = _batches(dataset, batch, seed, world)
            yield (
                _in_step(model, batches, count_batches(dataset, batch), world)
                if isinstance(model, FSDPModule)
                else batches
            )
    finally:
        for module, training in modes:
            module.training = training


def count_batches(dataset: Indexed, batch: int) -> int:
    """How many batches `evaluating` cuts the dataset into."""
    return -(-len(dataset) // batch)


def _in_step(
    model: nn.Module, batches: Iterator[tuple[int, Any]], count: int, world: World
) -> Iterator[tuple[int, Any]]:
    """The batches of this rank; each rank calls the model as often as the others, with or without a batch of its own.

    A model whose weights are sharded gathers them in each call, in which all ranks take part. A rank that has one
    batch less than others repeats the calls for its last one; a rank that has none makes those that rank 0 makes.
    """
    calls: list[tuple[Any, Any]] = []
    few = count < world.size

    def note(module: nn.Module, *call: Any) -> None:
        calls.append(call)
        if few:  # before the model gathers its weights
            world.broadcast_object(on_device(call, torch.device("cpu")))

    watch = model.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        for item in batches:
            calls.clear()
            yield item
    finally:
        watch.remove()
    if few and world.rank < count:
        world.broadcast_object(None)
    elif few:
        while call := world.broadcast_object(None):
            _repeat(model, [on_device(call, world.device)])
    elif world.rank >= count % world.size > 0:
        _repeat(model, calls)


def _repeat(model: nn.Module, calls: list[tuple[Any, Any]]) -> None:
    for args, named in calls:
        model(*args, **named)


def _batches(dataset: Indexed, batch: int, seed: int, world: World) -> Iterator[tuple[int, Any]]:
    mine = range(world.rank, count_batches(dataset, batch), world.size)
    keys = [[(index,) for index in range(len(dataset))[number * batch : (number + 1) * batch]] for number in mine]
    loader = DataLoader(Seeded(dataset, seed, "test sample"), batch_sampler=keys, generator=torch.Generator())
    for number, items in zip(mine, loader, strict=True):
        seed_everything(derive(seed, "test batch", number))
        yield number, on_device(items, world.device)
