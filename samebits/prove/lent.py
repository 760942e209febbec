"""The memory of a GPU that the process of a run lends while parts of the run are trained again on it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.shards import local
from ..core.state import State
from .room import free


def tensors_of(state: State) -> Iterator[Tensor]:
    """What this rank holds of weights, buffers, gradients, and the state of optimizers and objects.

    The ranks may have left the process group, without which no snapshot of shards can be taken.
    """
    yield from map(local, state.gradients().values())
    yield from _tensors([[*state.model.parameters()], [*state.model.buffers()]])
    yield from _tensors([optimizer.state for optimizer in state.optimizers.all])
    yield from _tensors([each.state_dict() for each in state.objects.values()])


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, DTensor):
        yield held.to_local().detach()
    elif isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping | list | tuple):
        for each in held.values() if isinstance(held, Mapping) else held:
            yield from _tensors(each)


@contextmanager
def lent(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep these tensors in the host's memory for a while, as far as it has room. Afterwards they are as before.

    Their storages are emptied and filled again, so tensors that share one still do.
    """
    storages = dict[int, torch.UntypedStorage]()
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # it has none: it is sparse, or stands for other tensors
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
    kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
    try:
        room = free() // 2  # the parts that are trained need some, too
        with suppress(RuntimeError, MemoryError):  # no room: what is left stays
            for storage in storages.values():
                room -= storage.nbytes()
                if room >= 0 and storage.resizable():
                    kept.append((storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)))
                    storage.resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # torch keeps what it has freed
        yield
    finally:
        for storage, copy in kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
