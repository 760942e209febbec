"""Modules are loaded without a look for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from .project import NAME

TRAINING = f"{NAME}.run", "torch._dynamo", "torch.distributed.fsdp"  # the last ones are loaded by the first optimizer


@contextmanager
def unsearched() -> Iterator[None]:
    """Look for no garbage while modules load, and never in what they leave.

    They leave none, and the looks take a third of the time to load torch. Each look later on would pass all that they
    have made.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()


def load(*names: str) -> None:
    """Load modules of libraries, before any of the owner's."""
    with unsearched():
        for name in names:
            import_module(name)
