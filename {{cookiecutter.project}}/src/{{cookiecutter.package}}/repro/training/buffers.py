"""Buffers, such as running statistics: alike on every rank after each step, on any world size.

Every micro-batch of a step begins with the same values, and the step ends with the mean of the micro-batches' changes.
The sum is exact in any order and over the whole range of float32, because each change is cut into limbs:

- A limb holds whole multiples of a power of two, so few that those of all micro-batches stay below 2**53 in float64.
- The limbs' ranges lie side by side, from 2**-92 to 2**129. What is left below the last one is rounded away.
- A change that is infinite, NaN or too large ends as NaN, and is reported.

Integer and boolean buffers are summed as int64. The mean of their changes has to be whole, as that of a counter is.
"""

import torch
from torch import Tensor, nn

from ..errors import Refused
from .world import World

TOP, BOTTOM = 129, -92  # exponents: float32 ends below 2**128, and a change may be twice as large


class Buffers:
    """The buffers of a module, by place: a module may put another tensor there instead of writing into the old one."""

    def __init__(self, module: nn.Module, micro_batches: int, world: World) -> None:
        self._micro_batches, self._world = micro_batches, world
        places = [
            (f"{prefix}.{name}".removeprefix("."), owner, name, buffer.is_floating_point() or buffer.is_complex())
            for prefix, owner in module.named_modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        places.sort(key=lambda place: not place[3])  # those that are summed as limbs come first
        self._places = [(label, owner, name) for label, owner, name, _ in places]
        self._in_limbs = sum(place[3] for place in places)
        room = 52 - (micro_batches - 1).bit_length()  # bits of a limb, one being left for rounding
        units = [2.0**exponent for exponent in range(TOP - room, BOTTOM - room, -room)]
        self._units = torch.tensor(units, dtype=torch.float64, device=world.device)[:, None]
        self._held: list[Tensor] = []
        self._before: list[Tensor] = []
        self._works: list[torch.distributed.Work | None] = []

    def begin(self) -> None:
        """A step begins: every micro-batch will begin with what the buffers hold now."""
        self._held = [getattr(owner, name) for _, owner, name in self._places]
        self._before = [tensor.detach().clone() for tensor in self._held]
        (self._now, self._numbers_now), self._rooms = self._make_rooms()
        self._look(self._before)
        self._start, self._numbers = self._now.clone(), self._numbers_now.clone()
        self._nan = self._start.isnan()
        self._limbs = self._start.new_zeros(len(self._units), self._start.numel())
        self._counts = torch.zeros_like(self._numbers)
        self._works = []

    def restore(self) -> None:
        """Give every buffer the values from before the step."""
        for (_, owner, name), tensor in zip(self._places, self._held, strict=True):
            if getattr(owner, name) is not tensor:
                setattr(owner, name, tensor)
        if self._held:
            with torch.no_grad():
                torch._foreach_copy_(self._held, self._before)

    def add(self) -> None:
        """A micro-batch is done: add what it changed.

        Raises:
            Refused: a buffer has another shape or dtype than before.
        """
        if not self._places:
            return
        after = [getattr(owner, name).detach() for _, owner, name in self._places]
        for (label, _, _), value, before in zip(self._places, after, self._before, strict=True):
            if (value.shape, value.dtype) != (before.shape, before.dtype):
                raise Refused(
                    f"buffer {label}: {tuple(before.shape)}, {before.dtype} before a micro-batch, "
                    f"{tuple(value.shape)}, {value.dtype} after it. Keep shape and dtype: the ranks add up what the "
                    f"micro-batches change"
                )
        self._look(after)
        self._counts += self._numbers_now - self._numbers
        alike = (self._now == self._start) | (self._now.isnan() & self._nan)  # infinities that stay are no change
        change = (self._now - self._start).masked_fill_(alike, 0.0)
        # each limb is what its unit makes visible beyond the limb above: multiples of 2**49 units, and a difference of
        # them, are exact
        rounded = (change / self._units).round_().mul_(self._units)
        self._limbs += torch.diff(rounded, dim=0, prepend=torch.zeros_like(rounded[:1]))

    def send(self) -> None:
        """All micro-batches of this rank are added: start the sums over the ranks."""
        sums = (self._limbs, self._counts)
        self._works = [self._world.sum(each, asynchronous=True) for each in sums if each.numel()]

    def reduce(self) -> None:
        """Give every buffer its value after the step."""
        for work in self._works:
            self._world.wait(work)
        change = torch.zeros_like(self._start)
        for limb in self._limbs:
            change += limb
        mean = torch.where(change == 0, self._start, self._start + change / self._micro_batches)
        whole = self._numbers + self._counts.div(self._micro_batches, rounding_mode="floor")
        self.restore()
        reals = [_real(tensor.detach()) for tensor in self._held]
        sizes = [real.numel() for real in reals]
        values = [*mean.split(sizes[: self._in_limbs]), *whole.split(sizes[self._in_limbs :])]
        for real, value in zip(reals, values, strict=True):
            real.copy_(value.view_as(real))

    def sound(self) -> Tensor:
        """Whether all buffers came out of the step without a new infinity or NaN: a scalar, not synchronised."""
        self._look([tensor.detach() for tensor in self._held])
        return (self._now.isfinite() | ~self._start.isfinite()).all()

    def unsound(self) -> list[str]:
        """The buffers that did not, by name."""
        sizes = [_real(tensor).numel() for tensor in self._held[: self._in_limbs]]
        found = (~self._now.isfinite() & self._start.isfinite()).split(sizes)
        labels = [label for label, _, _ in self._places[: self._in_limbs]]
        return [f"buffer {label}" for label, here in zip(labels, found, strict=True) if here.any()]

    def even(self) -> Tensor:
        """Whether the mean change of all integers is whole: a scalar, not synchronised."""
        return (self._counts % self._micro_batches == 0).all()

    def require_even(self) -> None:
        """Refuse integers whose mean change is not whole, by name."""
        sizes = [tensor.numel() for tensor in self._held[self._in_limbs :]]
        for (label, _, _), counts in zip(self._places[self._in_limbs :], self._counts.split(sizes), strict=True):
            if (counts % self._micro_batches).any():
                raise Refused(
                    f"buffer {label}: the micro-batches changed it by amounts whose mean is not whole, and it holds no "
                    f"fractions. Let every micro-batch change it alike, or make it float32"
                )

    def _make_rooms(self) -> tuple[list[Tensor], list[Tensor]]:
        """Two vectors for all floating-point numbers, as float64, and all others, as int64; and each buffer's place."""
        vectors, rooms = [], []
        for held, dtype in (
            (self._before[: self._in_limbs], torch.float64),
            (self._before[self._in_limbs :], torch.int64),
        ):
            sizes = [_real(tensor).numel() for tensor in held]
            vectors.append(torch.empty(sum(sizes), dtype=dtype, device=self._world.device))
            rooms += [room.view_as(_real(tensor)) for room, tensor in zip(vectors[-1].split(sizes), held, strict=True)]
        return vectors, rooms

    def _look(self, tensors: list[Tensor]) -> None:
        """Bring the values of all buffers into these vectors."""
        if tensors:
            torch._foreach_copy_(self._rooms, [_real(tensor) for tensor in tensors])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
