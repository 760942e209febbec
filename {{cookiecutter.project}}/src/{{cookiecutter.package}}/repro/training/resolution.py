"""Whether the grid of the sum is fine enough for the gradients that it rounds.

A gradient keeps all bits of float32 where it is at least 2**(lsb + 24). A tensor whose largest element is smaller is
summed less exactly than in float32, and elements below half of 2**lsb become 0. Nothing of that is an error in the
sense of bits, so it would go unseen. A tensor whose gradient is 2**14 times as small as the largest one is not told: as
much is left by rounding where a gradient is zero, such as that of a bias before a normalisation.
"""

import math

import torch
from torch import Tensor, nn

from ..asked.settings import Parallel
from ..differences import some
from .world import World

MANTISSA = 24  # bits of float32
NOISE = 2.0**-14  # of the largest gradient
ROOM = 10  # bits that gradients may grow


class Resolution:
    """Measures the micro-batches' gradients in the steps that ask for it."""

    def __init__(self, module: nn.Module, settings: Parallel, world: World) -> None:
        self._settings, self._world = settings, world
        names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self._names = list(names.values())
        self._place: dict[Tensor, int] = {parameter: place for place, parameter in enumerate(names)}
        self._told: set[str] = set()
        self.begin(False)

    def begin(self, measures: bool) -> None:
        """A step begins, which is measured or not."""
        self.measures = measures
        if measures:
            numbers = torch.zeros(3, len(self._names), dtype=torch.float64, device=self._world.device)
            self._largest, self._present, self._lost = numbers

    def take(self, parameter: Tensor, gradient: Tensor, multiples: Tensor) -> None:
        """A micro-batch's gradient was rounded to these multiples."""
        if not self.measures:
            return
        place, gradient = self._place[parameter], gradient.reshape(-1)
        self._largest[place] = torch.maximum(self._largest[place], gradient.abs().amax())
        self._present[place] += gradient.count_nonzero()
        self._lost[place] += ((multiples == 0) & (gradient != 0)).sum()

    def told(self) -> str | None:
        """A line on the parameters whose gradients the grid is too coarse for, once for each; the same on all ranks."""
        if not self.measures or not self._names:
            return None
        self._world.largest(self._largest)
        sums = torch.stack([self._present, self._lost])
        self._world.sum(sums)
        largest, (present, lost) = self._largest.tolist(), sums.tolist()
        lsb, most = self._settings.lsb, max(largest)
        coarse = {
            name: (size, gone / there)
            for name, size, there, gone in zip(self._names, largest, present, lost, strict=True)
            if there and most * NOISE < size < 2.0 ** (lsb + MANTISSA) and name not in self._told
        }
        if not coarse:
            return None
        self._told |= set(coarse)
        size, gone = min(coarse.values())
        finest = max(math.frexp(most)[1] + ROOM - self._settings.limit_exponent, -149)
        remedy = (
            f"parallel.lsb={finest} is the finest that leaves room for gradients {2**ROOM} times as large as any seen"
            if finest < lsb
            else f"a finer grid would leave no room for the largest gradient seen, {most:.1e}"
        )
        return (
            f"gradients of {some(list(coarse), 3)}: below {2.0 ** (lsb + MANTISSA):.1e}, so parallel.lsb={lsb} sums "
            f"them less exactly than float32 (worst: none above {size:.1e}, {gone:.0%} became 0); {remedy}"
        )
