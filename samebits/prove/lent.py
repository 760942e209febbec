"""The memory of a GPU that the process of a run lends while parts of the run are trained again on it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.batch import tensors_in
from ..core.shards import local
from ..core.state import State
from .room import free


def tensors_of(state: State) -> Iterator[Tensor]:
    """What this rank holds of weights, buffers, gradients, and the state of optimizers and objects.

    The ranks may have left the process group, without which no snapshot of shards can be taken.
    """
    yield from map(local, state.gradients().values())
    held = [*state.model.parameters()], [*state.model.buffers()], [each.state for each in state.optimizers.all]
    for each in tensors_in([held, [each.state_dict() for each in state.objects.values()]]):
        yield each.to_local().detach() if isinstance(each, DTensor) else each


@contextmanager
def lent(tensors: Iterable[Tensor], kind: str) -> Iterator[None]:
    """Keep those of these tensors that lie on a device of this `kind` in the host's memory for a while.

    They take at most half of what is free there. Afterwards all are as before. Their storages are emptied and filled
    again, so tensors that share one still do.
    """
    storages = dict[int, torch.UntypedStorage]()
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # it has none: it is sparse, or stands for other tensors
            storage = tensor.untyped_storage()
            if storage.device.type == kind:
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
