"""State that a model keeps from step to step where no checkpoint looks: plain attributes of its modules.

A counter in `self.calls` is lost when a run is resumed, and is another one on each rank. Whether it matters only the
owner knows: a value that is written before it is read does no harm. So it is told, by name, and not refused.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.text import differences, some
from ..core.observer import Observer, View

OWN = set(vars(nn.Module()))  # what every module has


class UnsavedState(Observer):
    """Compares the attributes after the first two steps; what modules set once, and then leave alone, is no state."""

    name = "unsaved state"
    vital = False

    def __init__(self, model: nn.Module, report: Callable[[str], None]) -> None:
        self._model, self._report = model, report
        self._seen: dict[str, Any] | None = None
        self._looks = 0

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Report what changed in the second step."""
        self._looks += 1
        if self._looks > 2:
            return
        before, self._seen = self._seen, _attributes(self._model)
        if before is not None and (found := [each.field for each in differences(before, self._seen)]):
            self._report(
                f"step {view.step}: {some(found, 3)}: changed in a step, and no checkpoint holds it. If a later step "
                f"reads it, bits depend on kills and on the world size: keep it in a buffer (register_buffer)"
            )


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers, text and tensors that modules hold besides parameters and buffers, as values that can be compared."""
    return {
        f"{name}.{key}".removeprefix("."): _bits(held) if isinstance(held, Tensor) else repr(held)
        for name, module in model.named_modules()
        for key, held in vars(module).items()
        if key not in OWN and (is_plain(held) or _is_kept(held))
    }


def is_plain(held: Any) -> bool:
    """Whether it is a number, text, None, or a container of such."""
    if isinstance(held, dict):
        return all(map(is_plain, held.values()))
    if isinstance(held, list | tuple | set | deque):
        return all(map(is_plain, held))
    return isinstance(held, int | float | str | None)


def _is_kept(held: Any) -> bool:
    """Whether it is a tensor that outlives the step whose graph made it."""
    return isinstance(held, Tensor) and held.grad_fn is None and not isinstance(held, nn.Parameter)


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
