"""The weights with which a run ends, unsharded, in one safetensors file: written, and given back to a model.

What a module's `get_extra_state` gives lies in it, too: its tensors beside the weights, the rest as metadata.
"""

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from .alike import together
from .ranks import World
from .shards import Held, is_extra, local, unsharded, weights
from .state import State
from .trees import copied, pack, unpack

EXTRA = "extra"


def gathered(state: State, folder: Path, world: World) -> nn.Module:
    """What safetensors' `save_model` asks of a model: on rank 0, whole weights; all ranks have to ask together.

    They are put together one at a time, and lie in files of `folder` that have no name, so that no memory holds all.

    Raises:
        RunError: the disk has no room for them.
    """
    named = state.weights()
    held = {id(each): each for each in named.values()}
    files = together(
        world, lambda: {key: _in_file(each, folder) for key, each in held.items()} if world.is_main else {}
    )
    for key, each in held.items():
        tensor = unsharded(each)
        if key in files:
            files[key].copy_(tensor)
    # tied ones share their memory
    tensors = {name: files.get(id(each)) for name, each in named.items()} | state.extras()
    return cast(nn.Module, SimpleNamespace(state_dict=lambda: tensors))


def _in_file(like: Held, folder: Path) -> Tensor:
    """Room for the whole tensor; the disk keeps it from the start, because a process that finds it full dies."""
    dtype, size = local(like).dtype, like.shape.numel()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".whole-") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, size * dtype.itemsize))
        data = torch.from_file(file.name, shared=True, size=size * dtype.itemsize, dtype=torch.uint8)
    return data.view(dtype).view(like.shape)


def save(model: nn.Module, path: Path) -> None:
    """Write the weights of a model into a file.

    Raises:
        OSError, safetensors.SafetensorError: the disk is full, for example.
    """
    state, extra_tensors = model.state_dict(), dict[str, Held]()
    extra = {name: value for name, value in state.items() if is_extra(name)}
    packed = {EXTRA: json.dumps(pack(extra, EXTRA, extra_tensors))} if extra else None
    tensors = {name: value for name, value in state.items() if name not in extra}
    tensors |= {name: copied(local(value)) for name, value in extra_tensors.items()}
    whole = _without_partial_views(tensors)
    save_model(cast(nn.Module, SimpleNamespace(state_dict=lambda: whole)), str(path), packed)
    _sort_metadata(path)


def _without_partial_views(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in place of views of memory that no tensor covers: safetensors refuses them.

    Equal views stay tied.
    """
    storages = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
    covered = {storages[name].data_ptr() for name in tensors if tensors[name].nbytes == storages[name].nbytes()}
    whole, copies = dict[str, Tensor](), dict[Any, Tensor]()
    for name, tensor in tensors.items():
        if storages[name].data_ptr() not in covered:
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if key not in copies:
                copies[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
            tensor = copies[key]
        whole[name] = tensor
    return whole


def _sort_metadata(path: Path) -> None:
    """Bring the entries of a file's metadata, such as the names of tied tensors, into order: safetensors has none."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        if len(header.get("__metadata__", {})) > 1:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            file.seek(8)
            file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def load(model: nn.Module, path: Path) -> None:
    """Give `model` the weights in a file, and its modules their extra state.

    Raises:
        RuntimeError, safetensors.SafetensorError: they are another network's.
        FileNotFoundError: there are none.
    """

    def put(tensors: dict[str, Tensor], strict: bool) -> Any:
        with safe_open(path, "pt") as file:
            packed = (file.metadata() or {}).get(EXTRA)
        extra = unpack(json.loads(packed), tensors) if packed else {}
        named = {name: tensor for name, tensor in tensors.items() if not (extra and name.startswith(f"{EXTRA}["))}
        return model.load_state_dict(named | extra, strict)

    like = SimpleNamespace(state_dict=lambda: weights(model), load_state_dict=put)
    load_model(cast(nn.Module, like), path)
