"""Buffers, such as running statistics: alike on every rank after each step, on any world size.

Every micro-batch of a step begins with the same values, and the step ends with the mean of the micro-batches' changes.
These are added in the tree of the gradients (tree.py), in float64: of all buffers together, as one vector.

Integer and boolean buffers are summed as int64. The mean of their changes has to be whole, as that of a counter is.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from .errors import UserError
from .ranks import World
from .transport import Transport
from .tree import Node, push

Kind = tuple[torch.Size, torch.dtype] | None  # of a buffer that is there, or not


class Buffers:
    """The buffers of a module, by place: a module may put another tensor there instead of writing into the old one.

    Attributes:
        counts: the changes of all whole numbers, as int64, added up over the micro-batches of this rank; then, of all.
    """

    def __init__(self, module: nn.Module, micro_batches: int, world: World, transport: Transport) -> None:
        self._total, self._world, self._transport = micro_batches, world, transport
        places = [
            (f"{prefix}.{name}".removeprefix("."), owner, name, buffer.is_floating_point() or buffer.is_complex())
            for prefix, owner in module.named_modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        places.sort(key=lambda place: not place[3])  # those of fractions come first
        self._places = [(label, owner, name) for label, owner, name, _ in places]
        self._fractions = sum(place[3] for place in places)
        self.counts = torch.zeros(0, dtype=torch.int64, device=world.device)
        self._held: list[Tensor] = []
        self._before: list[Tensor] = []

    def begin(self) -> None:
        """A step begins: every micro-batch will begin with what the buffers hold now."""
        if not self._places:
            return
        self._held = [getattr(owner, name) for _, owner, name in self._places]
        self._homes = [(owner._buffers, name) for _, owner, name in self._places]
        self._kinds = [_kind(tensor) for tensor in self._held]
        self._before = [tensor.detach().clone() for tensor in self._held]
        (self._now, self._numbers_now), self._rooms = self._make_rooms()
        self._look(self._before)
        self._start, self._numbers = self._now.clone(), self._numbers_now.clone()
        self._nodes: list[tuple[Node, Tensor]] = []
        self.counts, self._added = torch.zeros_like(self._numbers), 0

    def restore(self) -> None:
        """Give every buffer the values from before the step."""
        if not self._held:
            return
        for (buffers, name), tensor in zip(self._homes, self._held, strict=True):
            buffers[name] = tensor
        with torch.no_grad():
            torch._foreach_copy_(self._held, self._before)

    def add(self, number: int) -> None:
        """This micro-batch is done: add what it changed.

        Raises:
            UserError: a buffer has another shape or dtype than before.
        """
        if not self._places:
            return
        after = [buffers.get(name) for buffers, name in self._homes]
        if [_kind(value) for value in after] != self._kinds:
            self._refuse_kinds(after)
        self._look(cast(list[Tensor], after))
        self.counts += self._numbers_now
        self._added += 1
        push(self._nodes, (number, number + 1), self._now - self._start, self._total, Tensor.add_)

    def _refuse_kinds(self, after: list[Tensor | None]) -> NoReturn:
        for (label, _, _), before, now in zip(self._places, self._kinds, map(_kind, after), strict=True):
            if now != before:
                raise UserError(
                    f"buffer {label}: {_words(before)} before a micro-batch, {_words(now)} after it. Keep shape and "
                    f"dtype: the ranks add up what the micro-batches change"
                )
        raise AssertionError("no buffer differs")

    def send(self) -> None:
        """All micro-batches of this rank are added: start the sum over the ranks."""
        if not self._places:
            return
        self.counts -= self._added * self._numbers
        self._sum: Callable[[], Tensor] = self._transport.sum([node for _, node in self._nodes])

    def reduce(self, counts: Tensor) -> None:
        """Give every buffer its value after the step; `counts` are those of all ranks added up."""
        if not self._places:
            return
        change, self.counts = self._sum(), counts
        # an infinity that stays changes by inf - inf, which is NaN
        stays = (change == 0) | (change.isnan() & ~self._start.isfinite())
        mean = torch.where(stays, self._start, self._start + change / self._total)
        whole = self._numbers + self.counts.div(self._total, rounding_mode="floor")
        self.restore()
        reals = [_real(tensor.detach()) for tensor in self._held]
        sizes = [real.numel() for real in reals]
        values = [*mean.split(sizes[: self._fractions]), *whole.split(sizes[self._fractions :])]
        torch._foreach_copy_(reals, [value.view_as(real) for value, real in zip(values, reals, strict=True)])

    def sound(self) -> list[Tensor]:
        """Scalars, not synchronised: whether all buffers came out of the step without a new infinity or NaN."""
        if not self._places:
            return []
        self._look([tensor.detach() for tensor in self._held])
        return [(self._now.isfinite() | ~self._start.isfinite()).all()]

    def unsound(self) -> list[str]:
        """The buffers that did not, by name."""
        if not self._places:
            return []
        sizes = [_real(tensor).numel() for tensor in self._held[: self._fractions]]
        found = (~self._now.isfinite() & self._start.isfinite()).split(sizes)
        labels = [label for label, _, _ in self._places[: self._fractions]]
        return [f"buffer {label}" for label, here in zip(labels, found, strict=True) if here.any()]

    def odd(self) -> list[Tensor]:
        """Scalars, not synchronised: whether the mean change of some integer is not whole."""
        return [(self.counts % self._total != 0).any()] if self._places else []

    def require_even(self) -> None:
        """Refuse integers whose mean change is not whole, by name."""
        if not self._places:
            return
        sizes = [tensor.numel() for tensor in self._held[self._fractions :]]
        for (label, _, _), counts in zip(self._places[self._fractions :], self.counts.split(sizes), strict=True):
            if (counts % self._total).any():
                raise UserError(
                    f"buffer {label}: the micro-batches changed it by amounts whose mean is not whole, and it holds no "
                    f"fractions. Let every micro-batch change it alike, or make it float32"
                )

    def _make_rooms(self) -> tuple[list[Tensor], list[Tensor]]:
        """Two vectors for all floating-point numbers, as float64, and all others, as int64; and each buffer's place."""
        vectors, rooms = [], []
        for held, dtype in (
            (self._before[: self._fractions], torch.float64),
            (self._before[self._fractions :], torch.int64),
        ):
            sizes = [_real(tensor).numel() for tensor in held]
            vectors.append(torch.empty(sum(sizes), dtype=dtype, device=self._world.device))
            rooms += [room.view_as(_real(tensor)) for room, tensor in zip(vectors[-1].split(sizes), held, strict=True)]
        return vectors, rooms

    def _look(self, tensors: Sequence[Tensor]) -> None:
        """Bring the values of all buffers into these vectors."""
        with torch.no_grad():
            torch._foreach_copy_(self._rooms, [_real(tensor) for tensor in tensors])


def _kind(value: Tensor | None) -> Kind:
    return None if value is None else (value.shape, value.dtype)


def _words(kind: Kind) -> str:
    return f"{tuple(kind[0])}, {kind[1]}" if kind else "no buffer"


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
