"""Evaluation that changes nothing of the training around it, and gives the same numbers on any number of ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .batch import on_device
from .errors import UserError
from .generators import own_generators, preserved, seed_own
from .plan import Indexed
from .ranks import World
from .sampling import Loading, Slices, batches
from .seeds import derive, seed_everything


@contextmanager
def evaluating(model: nn.Module, dataset: Indexed, batch: int, loading: Loading) -> Iterator[Iterator[tuple[int, Any]]]:
    """Give this rank's part of `dataset`: pairs of a batch's number and the batch, on the device.

    The dataset is cut into the same batches of at most `batch` samples on any world size, and the ranks take turns. The
    model is in evaluation mode and without gradients inside. Transforms and modules may draw: each sample and each
    batch is seeded, from the root seed.

    After it every module is in the mode that it had, a frozen one too, and the generators go on where they were. A
    model that was compiled in place is called as it was before, as in an evaluation of its weights alone.
    """
    modes = [(module, module.training) for module in model.modules()]
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        model.eval()
        with preserved(), torch.no_grad():
            batches, count = _batches(model, dataset, batch, loading), count_batches(dataset, batch)
            yield _in_step(model, batches, count, loading.world) if isinstance(model, FSDPModule) else batches
    finally:
        for module, training in modes:
            module.training = training
        model._compiled_call_impl = compiled


def sums(
    measure: Callable[[nn.Module, Any], Mapping[str, Tensor]],
    model: nn.Module,
    dataset: Indexed,
    batch: int,
    loading: Loading,
) -> dict[str, Tensor]:
    """The sums, over all batches of `dataset`, of each tensor that `measure(model, batch)` returns by its name.

    Every rank gets those of all batches. Whole numbers and truths are added as int64. A floating-point number of each
    batch has a float64 slot of its own, and the slots are added at the end. So no sum depends on the rank that has
    computed a batch. Batches and modes are those of `evaluating`.

    Raises:
        UserError: `measure` returns something else, or tensors of another shape than before; or there is no sample.
    """
    count, world = count_batches(dataset, batch), loading.world
    if not count:
        raise UserError("the dataset to evaluate has no sample, one at least wanted")
    totals: dict[str, Tensor] = {}
    with evaluating(model, dataset, batch, loading) as batches:
        for number, given in batches:
            measured: Any = measure(model, given)
            for name, value in _measured(measured, totals).items():
                if name not in totals:
                    totals[name] = _zeros(tuple(value.shape), value.is_floating_point(), count, world)
                place = totals[name][number] if value.is_floating_point() else totals[name]
                place += value
    if count < world.size:  # some ranks had no batch, and know neither names nor shapes
        first = {name: (value.dtype.is_floating_point, tuple(value.shape)) for name, value in totals.items()}
        for name, (floating, shape) in world.broadcast_object(first).items():
            totals.setdefault(name, _zeros(shape[1:] if floating else shape, floating, count, world))
    for value in totals.values():
        world.sum(value)
    return {name: value.sum(0) if value.is_floating_point() else value for name, value in totals.items()}


def _zeros(shape: tuple[int, ...], floating: bool, count: int, world: World) -> Tensor:
    """What the values of this shape are added up in: for floating-point numbers a slot for each batch."""
    if floating:
        return torch.zeros(count, *shape, dtype=torch.float64, device=world.device)
    return torch.zeros(shape, dtype=torch.int64, device=world.device)


def _measured(measured: Any, totals: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a batch measures, if it can be added to what the batches before have measured."""
    if not isinstance(measured, Mapping) or not all(isinstance(value, Tensor) for value in measured.values()):
        raise UserError(f"measure(model, batch) returned {type(measured).__name__}, a dict of tensors by name wanted")
    if totals and measured.keys() != totals.keys():
        raise UserError(f"measure(model, batch) returned {sorted(measured)}, the names of before wanted: {[*totals]}")
    for name, value in measured.items():
        held = totals.get(name)
        if held is None:
            continue
        shape = held.shape[1:] if held.is_floating_point() else held.shape
        if value.shape != shape or value.is_floating_point() != held.is_floating_point():
            raise UserError(
                f"measure(model, batch) returned {name} as {value.dtype} {tuple(value.shape)}, "
                f"{held.dtype} {tuple(shape)} wanted, as of the batches before: sum over the samples of a batch"
            )
    return measured


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


def _batches(model: nn.Module, dataset: Indexed, batch: int, loading: Loading) -> Iterator[tuple[int, Any]]:
    world, seed, own = loading.world, loading.options.seed, own_generators([model])
    mine = range(world.rank, count_batches(dataset, batch), world.size)
    loader = loading.loader(dataset, Slices(len(dataset), batch, mine))
    for number, items in zip(mine, batches(loader, world, loading.settle, loading.making), strict=True):
        of_batch = derive(seed, "test batch", number)
        seed_everything(of_batch)
        seed_own(own, of_batch)
        yield number, on_device(items, world.device)
