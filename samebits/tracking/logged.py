"""The model for MLflow, beside the weights: pickled as a whole, with its code and the shapes that it takes and gives.

model.safetensors remains the file of the weights. The pickle serves who loads a model from MLflow without the project.
"""

import copy
import inspect
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..address import address
from ..base.files import durable
from ..base.project import Project
from ..core.observer import Observer, View
from ..record import names
from ..record.code_state import public_files


class Shapes(Observer):
    """Notes the tensors that a model takes and gives in its first call from outside.

    Attributes:
        seen: {"inputs": [{"name", "dtype", "shape"}, …], "outputs": …}, with -1 in place of the micro-batch's size;
            None before the first call.
    """

    name = "shapes"

    def __init__(self, model: nn.Module, size: int, write: Callable[[dict[str, Any]], object]) -> None:
        """`size` is a micro-batch's; `write` takes what was seen, once."""
        self._write, self._written = write, False
        self.seen: dict[str, list[dict[str, Any]]] | None = None
        self._parameters, self._size = inspect.signature(model.forward), size
        self._model, self._compiled = model, model._compiled_call_impl
        if self._compiled:  # with a hook, another graph would be compiled
            model._compiled_call_impl = self._call
        else:
            # a function, which a copy of the model shares: a bound method would be copied with all that this holds
            self._hook = model.register_forward_hook(lambda *call: self._note(*call[1:]), with_kwargs=True)

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Write down what was seen."""
        if not self._written:
            self._written = True
            self._write(self.seen or {})

    def close(self, error: BaseException | None) -> None:
        """Nothing is noted any more."""
        self._let_go()

    def _let_go(self) -> None:
        if not self._compiled:
            self._hook.remove()
        elif self._model._compiled_call_impl:
            self._model._compiled_call_impl = self._compiled

    def _call(self, *args: Any, **named: Any) -> Any:
        """A compiled model is called."""
        assert self._compiled
        output = self._compiled(*args, **named)
        self._note(args, named, output)
        return output

    def _note(self, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self._let_go()
        if self.seen:  # by a copy of the model, made before
            return
        try:
            inputs: dict[Any, Any] = self._parameters.bind(*args, **named).arguments
        except TypeError:  # a hook has called it in a way of its own
            inputs = dict(enumerate(args)) | named
        self.seen = {"inputs": self._described(inputs), "outputs": self._described(output)}

    def _described(self, held: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": [-1 if place == 0 and size == self._size else size for place, size in enumerate(tensor.shape)],
            }
            for name, tensor in _named(held).items()
        ]


def _named(held: Any) -> dict[str, Tensor]:
    """The tensors of a container by their names or places, or the one tensor itself."""
    if isinstance(held, Tensor):
        return {"": held}
    if isinstance(held, tuple | list):
        held = dict(enumerate(held))
    items = held.items() if isinstance(held, Mapping) else ()
    return {str(name): tensor for name, tensor in items if isinstance(tensor, Tensor)}


def write(model: nn.Module, project: Project, out: Path) -> str | None:
    """Write model.pth and code.zip into `out`; or return a line that tells why this model has none."""
    if isinstance(model, FSDPModule):
        return "MLflow gets the weights, but no model that it can load: parallel.shard=full has sharded it"
    import cloudpickle  # takes along a class that the loop's own file defines

    try:
        with durable(out / names.PICKLED) as beside:
            with beside.open("wb") as file:
                torch.save(_on_cpu(model), file, pickle_module=cloudpickle)
            write_code(project, out / names.CODE)
    except Exception as error:  # whatever the classes of a model raise when they are pickled; a full disk
        for name in names.LOGGED:
            (out / name).unlink(missing_ok=True)
        said = " ".join(str(error).split())[:200].rstrip(".")
        return (
            f"MLflow gets the weights, but no {type(model).__name__} that it can load: {type(error).__name__}: {said}. "
            f"To go without, set tracking.model=false"
        )
    return None


def write_code(project: Project, path: Path) -> None:
    """Write package and library into a zip file, from which Python imports them; the same files give the same bytes.

    Files that git ignores, and those that look like secrets, stay here.
    """
    with durable(path) as beside, zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in public_files(project, address.project_files(project)):
            inside = name if name.startswith(address.FOLDER) else f"{project.name}/{name}"
            member = zipfile.ZipInfo(inside)  # with a date that never changes
            member.external_attr = 0o644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)


def _on_cpu(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers lie on the CPU, and share their memory where they do already."""
    held = [*model.parameters(), *model.buffers()]
    here = {id(each): each.detach().cpu() for each in held}
    trainable = {id(each): nn.Parameter(here[id(each)], each.requires_grad) for each in model.parameters()}
    return copy.deepcopy(model, {**here, **trainable})
