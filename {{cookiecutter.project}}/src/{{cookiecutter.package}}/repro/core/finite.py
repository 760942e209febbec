"""Infinities and NaN in what a step has summed: found on every rank alike, with one look at the device."""

import torch
from torch import Tensor, nn

from .buffers import Buffers
from .ranks import ALONE
from .shards import Shard, gradient_of, local


def nonfinite(module: nn.Module, buffers: Buffers) -> list[str]:
    """Names of the gradients and buffers that hold an infinity or a NaN after a reduction; the same on every rank.

    With each gradient stands its largest finite value.

    Raises:
        UserError: an integer buffer has no whole mean.
    """
    held = [(name, gradient) for name, p in module.named_parameters() if (gradient := gradient_of(p)) is not None]
    world = next((gradient.world for _, gradient in held if isinstance(gradient, Shard)), ALONE)
    # a sum that is finite has finite terms: to add takes a CPU a tenth of the time of a look at each
    sums = torch.stack([local(gradient).sum() for _, gradient in held]) if held else torch.zeros(1)
    bad = torch.stack([*buffers.odd(), ~sums.isfinite().all()]).sum()
    world.sum(bad)
    if torch.stack([bad == 0, *buffers.sound()]).all():  # one synchronisation, not one each
        return []
    buffers.require_even()
    counts = torch.stack([(~local(gradient).isfinite()).any() for _, gradient in held]).to(torch.int64)
    world.sum(counts)
    largest = torch.stack([_largest_finite(local(gradient)) for _, gradient in held])
    world.largest(largest)
    seen = zip(held, counts.tolist(), largest.tolist(), strict=True)
    names = [f"{name} (largest finite value {value:.1e})" for (name, _), count, value in seen if count]
    return [*names, *buffers.unsound()]


def _largest_finite(gradient: Tensor) -> Tensor:
    magnitudes = gradient.double().abs().reshape(-1)
    return torch.cat([magnitudes.where(magnitudes.isfinite(), 0.0), magnitudes.new_zeros(1)]).amax()


def one_nan(module: nn.Module) -> None:
    """Canonicalize the NaNs of the gradients: their payload depends on the order of the sum."""
    for parameter in module.parameters():
        if (gradient := gradient_of(parameter)) is not None:
            here = local(gradient)
            here[here.isnan()] = torch.nan
