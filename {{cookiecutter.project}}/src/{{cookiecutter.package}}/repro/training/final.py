"""model.safetensors: the weights with which a run ends, whole in one file."""

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from ..asked.manifest import sha256_file
from ..errors import Failure, Refused
from ..files import rename
from ..records import names
from .pieces import Held, local, weights, whole
from .world import World


def gathered(model: nn.Module, folder: Path, world: World) -> nn.Module:
    """What safetensors' `save_model` asks of a model: on the lead, whole weights; all ranks have to ask together.

    They are put together one at a time, and lie in files of `folder` that have no name, so that no memory holds all.

    Raises:
        Failure: the disk has no room for them.
    """
    named = weights(model)
    held = {id(each): each for each in named.values()}
    files = world.together(lambda: {key: _in_file(each, folder) for key, each in held.items()} if world.leads else {})
    for key, each in held.items():
        tensor = whole(each)
        if key in files:
            files[key].copy_(tensor)
    tensors = {name: files.get(id(each)) for name, each in named.items()}  # tied ones share their memory
    return cast(nn.Module, SimpleNamespace(state_dict=lambda: tensors))


def _in_file(like: Held, folder: Path) -> Tensor:
    """Room for the whole tensor; the disk keeps it from the start, because a process that finds it full dies."""
    dtype, size = local(like).dtype, like.shape.numel()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".whole-") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, size * dtype.itemsize))
        data = torch.from_file(file.name, shared=True, size=size * dtype.itemsize, dtype=torch.uint8)
    return data.view(dtype).view(like.shape)


def write(model: nn.Module, out: Path) -> None:
    """Write the weights of a model into the run directory `out`.

    Raises:
        Failure: the disk is full, for example.
    """
    beside = out / f"{names.WEIGHTS}.part"
    try:
        save_model(model, str(beside))
    except (OSError, SafetensorError) as error:
        raise Failure(f"{out / names.WEIGHTS} was not written: {error}; the same command tries again") from None
    shutil.copymode(out / names.ADDRESS, beside)  # safetensors leaves it to its owner alone
    rename(beside, out / names.WEIGHTS)


def load_weights(model: nn.Module, out: Path) -> str:
    """Give `model` the weights of the finished run in `out`; returns their SHA-256, for an evaluation to state.

    Raises:
        Refused: there are none, or they are another network's.
    """
    path = out / names.WEIGHTS
    try:
        load_model(model, path)
    except FileNotFoundError:
        raise Refused(f"{path}: missing. Train first: make repro") from None
    except (RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())
        raise Refused(f"{path}: other weights than params.yaml describes. Train again. {said[:200]}") from None
    return sha256_file(path)
