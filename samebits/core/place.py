"""The variables in which torchrun tells a process its place among the ranks."""

import os
import re

from .errors import UserError

NEXT = "torchrun sets it: start the ranks with torchrun or --ranks, or unset it to run alone"


def number(name: str, otherwise: int) -> int:
    """The whole number that a variable holds; `otherwise` where it is not set.

    Raises:
        UserError: it holds something else.
    """
    text = os.environ.get(name)
    if text is None:
        return otherwise
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"{name}={text!r} is set, a whole number wanted; {NEXT}", local=True)
    return int(text)


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the world size; (0, 1) where nothing is set.

    Raises:
        UserError: the variables contradict each other, or one of those is missing by which several ranks meet.
    """
    rank, size = number("RANK", 0), number("WORLD_SIZE", 1)
    if rank >= size:
        raise UserError(
            f"RANK={rank} is set, a rank below the world size {size} wanted (WORLD_SIZE); {NEXT}", local=True
        )
    number("MASTER_PORT", 0)
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 and name not in os.environ]:
        raise UserError(f"WORLD_SIZE={size} is set, and {missing[0]} is not; {NEXT}", local=True)
    return rank, size
