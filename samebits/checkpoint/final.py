"""model.safetensors of a run directory: the weights with which a run ends."""

import shutil
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from ..address.manifest import sha256_file
from ..base.files import durable
from ..core import weights
from ..core.errors import RunError, UserError
from ..record import names


def write(model: nn.Module, out: Path) -> None:
    """Write the weights of a model into the run directory `out`.

    Raises:
        RunError: the disk is full, for example.
    """
    with durable(out / names.WEIGHTS) as beside:
        try:
            weights.save(model, beside)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{out / names.WEIGHTS} was not written: {error}; the same command tries again") from None
        shutil.copymode(out / names.ADDRESS, beside)  # safetensors leaves it to its owner alone


def load_weights(model: nn.Module, out: Path) -> str:
    """Give `model` the weights of the finished run in `out`, and its modules their extra state.

    Returns the SHA-256 of the file, for an evaluation to state.

    Raises:
        UserError: there are none, or they are another network's.
    """
    path = out / names.WEIGHTS
    try:
        weights.load(model, path)
    except FileNotFoundError:
        raise UserError(f"{path}: missing. Train first: make repro") from None
    except (RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{path}: other weights than params.yaml describes. Train again. {said[:200]}") from None
    return sha256_file(path)
