"""The part that decides the result: imports torch, numpy and itself. The content address states its arithmetic."""

from .arithmetic import ARITHMETIC as ARITHMETIC
