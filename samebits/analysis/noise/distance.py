"""How far the weights of one run lie from those of another."""

import math
from pathlib import Path

from safetensors import safe_open

from ...base.shape import shown
from ...core.errors import RunError


def distance(one: Path, other: Path) -> float:
    """The relative L2 distance ||a - b|| / ||a|| over all floating-point tensors of two files, in float64.

    A tensor is read at a time. It is NaN where a number is, and infinite where all of a is zero and b is not.

    Raises:
        RunError: the files hold other tensors, or tensors of other shapes.
    """
    moved = size = 0.0
    with safe_open(one, "pt") as a, safe_open(other, "pt") as b:
        names = [sorted(file.keys()) for file in (a, b)]
        if names[0] != names[1]:
            raise RunError(f"{one} and {other}: other tensors, so the weights have no distance")
        for name in names[0]:
            x, y = a.get_tensor(name), b.get_tensor(name)
            if x.shape != y.shape:
                raise RunError(f"{one} and {other}: {shown(name)} has another shape, so the weights have no distance")
            if x.is_floating_point():
                x, y = x.double(), y.double()
                moved = math.hypot(moved, float((x - y).norm()))
                size = math.hypot(size, float(x.norm()))
    return moved / size if size else moved * math.inf if moved else 0.0
