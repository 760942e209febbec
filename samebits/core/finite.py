"""Infinities and NaN in what a step has summed: found on every rank alike, with one look at the device."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .buffers import Buffers
from .ranks import ALONE
from .shards import Held, Shard, local


def nonfinite(buffers: Buffers, gradients: Mapping[str, Held]) -> list[str]:
    """Names of the gradients and buffers that hold an infinity or a NaN after a reduction; the same on every rank.

    With each gradient stands its largest finite value.

    Raises:
        UserError: an integer buffer has no whole mean.
    """
    held = [*map(local, gradients.values())]
    world = next((gradient.world for gradient in gradients.values() if isinstance(gradient, Shard)), ALONE)
    # a sum that is finite has finite terms: to add takes a CPU a tenth of the time of a look at each
    sums = torch.stack([here.sum() for here in held]) if held else torch.zeros(1)
    bad = torch.stack([*buffers.odd(), ~sums.isfinite().all()]).sum()
    world.sum(bad)
    if torch.stack([bad == 0, *buffers.sound()]).all():  # one synchronisation, not one each
        return []
    buffers.require_even()
    counts = torch.stack([(~here.isfinite()).any() for here in held]).to(torch.int64)
    world.sum(counts)
    largest = torch.stack([*map(_largest_finite, held)])
    world.largest(largest)
    seen = zip(gradients, counts.tolist(), largest.tolist(), strict=True)
    names = [f"{name} (largest finite value {value:.1e})" for name, count, value in seen if count]
    return [*names, *buffers.unsound()]


def _largest_finite(gradient: Tensor) -> Tensor:
    magnitudes = gradient.double().abs().reshape(-1)
    return torch.cat([magnitudes.where(magnitudes.isfinite(), 0.0), magnitudes.new_zeros(1)]).amax()


def one_nan(gradients: Iterable[Held]) -> None:
    """Canonicalize the NaNs of gradients: their payload depends on the order of the sum."""
    for here in map(local, gradients):
        here[here.isnan()] = torch.nan
