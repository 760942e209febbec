"""Tensors in safetensors files of one folder, whole or sharded.

    model.safetensors          {"head.bias": (10,)}: whole, by rank 0
    model-00001.safetensors    {"head.weight:320": (320,)}: what rank 1 holds, from element 320 on; and, as metadata,
                               {"shapes": {"head.weight": [10, 64]}}, those of the wholes

Any interval of a tensor can be read, wherever it was cut.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.ranks import World
from ..core.shards import Held, Shard, Stored, unsharded


def save(tensors: Mapping[str, Held | Stored], folder: Path, group: str, world: World) -> list[Path]:
    """Write what this rank has to: its shards, and rank 0 what is whole. Returns the files."""
    shards = {name: held for name, held in tensors.items() if isinstance(held, Shard)}
    written = []
    if world.is_main:
        wholes = {name: unsharded(held) for name, held in tensors.items() if not isinstance(held, Shard)}
        written.append(file_of(folder, group))
        save_file(wholes, written[-1])
    if shards:
        shapes = json.dumps({name: list(shard.shape) for name, shard in shards.items()})
        parts = {f"{name}:{shard.start}": shard.local for name, shard in shards.items()}
        written.append(file_of(folder, f"{group}-{world.rank:05d}"))
        save_file(parts, written[-1], metadata={"shapes": shapes})  # one entry: entries have no order
    return written


def file_of(folder: Path, group: str) -> Path:
    """The file of a group of tensors."""
    return folder / f"{group}.safetensors"


def read(folder: Path, group: str) -> dict[str, Stored]:
    """The tensors of a group, by name; a file is mapped into memory, and read where an interval is asked for."""
    shapes: dict[str, Sequence[int]] = {}
    parts: dict[str, list[_Part]] = defaultdict(list)
    for path in [file_of(folder, group), *sorted(folder.glob(f"{group}-*.safetensors"))]:
        file = safe_open(path, "pt")
        cut = json.loads((file.metadata() or {}).get("shapes", "{}"))
        for key in file.keys():  # noqa: SIM118 - it is no dict
            shape = file.get_slice(key).get_shape()
            name, _, start = key.rpartition(":") if cut else (key, "", "0")
            shapes[name] = cut.get(name, shape)
            parts[name].append(_Part(int(start), int(start) + math.prod(shape), partial(file.get_tensor, key)))
    return {name: _stored(torch.Size(shapes[name]), parts[name]) for name in sorted(parts)}


class _Part(NamedTuple):
    """An interval of a tensor, and how it is read."""

    start: int
    stop: int
    tensor: Callable[[], Tensor]


def _stored(shape: torch.Size, parts: Sequence[_Part]) -> Stored:
    def read(first: int, last: int) -> Tensor:
        wanted = [part for part in parts if part.start < last and first < part.stop] or parts[:1]
        wanted = sorted(wanted, key=lambda part: part.start)
        return torch.cat([p.tensor().view(-1)[max(first - p.start, 0) : max(last - p.start, 0)] for p in wanted])

    return Stored(shape, parts[0].tensor().dtype, read)


def broadcast_object(tensors: Mapping[str, Stored] | None, world: World) -> dict[str, Stored]:
    """Rank 0's tensors, which the others do not see; all ranks have to read the same ones, in the same order."""
    outline = world.broadcast_object(tensors and {name: (each.shape, each.dtype) for name, each in tensors.items()})

    def reading(name: str, shape: torch.Size, dtype: torch.dtype) -> Callable[[int, int], Tensor]:
        def read(first: int, last: int) -> Tensor:
            tensor = (unsharded(tensors[name]) if tensors else torch.empty(shape, dtype=dtype)).to(world.device)
            world.broadcast(tensor)
            return tensor.reshape(-1)[first:last].cpu()

        return read

    return {name: Stored(shape, dtype, reading(name, shape, dtype)) for name, (shape, dtype) in outline.items()}
