"""The part that decides the result: imports torch, numpy and itself. The content address states its arithmetic."""

from importlib import resources

ARITHMETIC = int(resources.files(__name__).joinpath("ARITHMETIC").read_text())  # the library may lie in a zip file
