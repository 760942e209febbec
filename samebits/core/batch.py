"""A batch as the DataLoader collates it: tensors in nested lists, tuples and mappings."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import UserError


def on_device(batch: Any, device: torch.device) -> Any:
    """The same batch on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named one
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch  # text, say


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings, such as a batch or an operation's arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order.

    Raises:
        UserError: it holds none.
    """
    found = list(tensors_in(batch))
    if not found:
        raise UserError("a batch holds no tensor: let the dataset's items hold tensors, arrays or numbers")
    return found
