"""model.safetensors of a run directory: the weights with which a run ends."""

import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..address.manifest import sha256_file
from ..base.files import durable
from ..config.settings import Start
from ..core import shards, weights
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


def start_from(model: nn.Module, start: Start) -> None:
    """Give `model` the weights from which a run starts; which ones these are is checked before.

    Raises:
        UserError: a tensor is not there, or has another shape or dtype.
    """
    path = Path(start.run) / names.WEIGHTS
    try:
        there, here = _shapes(path), {name: _shape(shards.local(held)) for name, held in shards.weights(model).items()}
        for name in [*here, *there]:
            if (seen := there.get(name, "none")) != (wanted := here.get(name, "none")):
                raise UserError(
                    f"{path}: {name}: {seen} seen, {wanted} wanted by this model: start from a run of the same model"
                )
        weights.load(model, path)
    except (RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{path}: other weights than this model's: {said[:200]}") from None


def _shapes(path: Path) -> dict[str, str]:
    """The dtype and shape of each tensor in a file; one that is tied to another has two names."""
    with safe_open(path, "pt") as file:
        tied = {name: kept for name, kept in (file.metadata() or {}).items() if name != weights.EXTRA}
        names_there = [name for name in file.keys() if not name.startswith(f"{weights.EXTRA}[")]  # noqa: SIM118
        own = {name: _shape(file.get_tensor(name)) for name in names_there}
    return own | {name: own[kept] for name, kept in tied.items() if kept in own}


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
