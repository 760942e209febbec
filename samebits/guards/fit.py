"""Models that the contract cannot carry are refused before step 0, by module and with the remedy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..base.text import some
from ..core.errors import UserError
from ..core.trees import is_storable

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

MODULES: list[tuple[Callable[[Any], object], str]] = [
    (
        lambda module: isinstance(module, nn.SyncBatchNorm),
        "its statistics depend on the world size. Use BatchNorm: it sees a micro-batch, of one size on any world size",
    ),
    (
        lambda module: isinstance(module, WRAPPERS),
        "the run sums the gradients itself. Give run.steps() the model without this wrapper",
    ),
    (
        lambda module: isinstance(module, EMBEDDINGS) and module.sparse,
        "its gradients are sparse, and the sum wants dense ones. Make it with sparse=False",
    ),
]

TENSORS: list[tuple[Callable[[Any], object], str]] = [
    (
        lambda tensor: isinstance(tensor, UninitializedParameter | UninitializedBuffer),
        "its shape is not known yet. Call the model once, on a batch of the right shape, before you make the optimizer",
    ),
    (
        lambda tensor: isinstance(tensor, nn.Parameter) and tensor.is_complex(),
        "the sum of gradients wants real numbers. Hold it as a real parameter with a last dimension of 2, and call "
        "torch.view_as_complex on it",
    ),
    (
        lambda tensor: not isinstance(tensor, DTensor) and not is_storable(tensor),
        "expected a strided tensor in memory. It has no digest, and no checkpoint can hold it. Hold a dense tensor and "
        "make this one from it in forward",
    ),
    (
        lambda tensor: tensor.is_conj() or tensor.is_neg() or _overlaps(tensor),
        "expected a tensor of its own, got a view that torch cannot write into. Hold a copy: "
        "tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)",
    ),
]


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True if elements share memory, as those of an expanded tensor do."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def require_fit(model: nn.Module, device: torch.device, moves: bool = False) -> None:
    """Refuse a model whose gradients the library cannot sum, or that lies on another device than the run.

    One that `moves` may lie on the CPU.

    Raises:
        UserError: naming its modules or tensors, and a way that works.
    """
    devices = {p.device for p in model.parameters()} - {device}
    if elsewhere := sorted(map(str, devices - {torch.device("cpu")} if moves else devices)):
        raise UserError(
            f"the model lies on {', '.join(elsewhere)}, the run is on {device}: call model.to(run.world.device) before "
            f"you make the optimizer"
        )
    modules: list[tuple[str, Any]] = list(model.named_modules())
    tensors: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    for kinds, held in ((MODULES, modules), (TENSORS, tensors)):
        for unfit, remedy in kinds:
            if found := [(name, thing) for name, thing in held if unfit(thing)]:
                kind = type(found[0][1]).__name__
                raise UserError(f"{some([name or 'the model' for name, _ in found], 3)} ({kind}): {remedy}")
