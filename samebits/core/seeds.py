"""Every random number of a run is a pure function of the root seed and of what it is for."""

import hashlib
import json
import random
from functools import cache

# purpose -> what its ids are. A purpose outside this table is a typo, so it is refused.
PURPOSES = {
    "init": (),
    "order": ("epoch",),
    "sample": ("epoch", "index"),
    "collation": ("epoch", "index"),
    "placed sample": ("epoch", "place", "index"),
    "placed collation": ("epoch", "place", "index"),
    "micro-batch": ("step", "number"),
    "further sum": ("step", "number", "pass"),
    "test sample": ("index",),
    "test collation": ("index",),
    "test batch": ("number",),
}


def derive(root: int, purpose: str, *ids: int) -> int:
    """Hash (root, purpose, ids) to a seed in [0, 2**64).

    Hashing keeps the streams apart where arithmetic such as `seed + rank` makes them collide.

    Raises:
        ValueError: an unknown purpose, or a wrong number of ids for it.
    """
    if purpose not in PURPOSES or len(ids) != len(PURPOSES[purpose]):
        raise ValueError(f"derive(root, {purpose!r}, *{ids}): wanted one of {PURPOSES}")
    begun, rest = _begun(root, purpose)
    hashed = begun.copy()
    hashed.update(rest % ids)
    return int.from_bytes(hashed.digest(), "little")


@cache
def _begun(root: int, purpose: str) -> tuple["hashlib.blake2b", bytes]:
    """The hash of the JSON text `[root, purpose`, and the rest of that text, to be filled with the ids.

    JSON is unambiguous: no two argument lists share a text.
    """
    begun = hashlib.blake2b(json.dumps([root, purpose])[:-1].encode(), digest_size=8)
    return begun, b", %d" * len(PURPOSES[purpose]) + b"]"


def numbered(seed: int, number: int) -> int:
    """One of the seeds that follow from a seed, in [0, 2**64)."""
    return int.from_bytes(hashlib.blake2b(b"[%d, %d]" % (seed, number), digest_size=8).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's generators (on all devices) from one 64-bit number."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # all that numpy's global generator takes
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generators, on all devices."""
    import torch

    # Without a GPU torch.manual_seed formats three stack traces and keeps them: that took half of a small step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # it is from the start of a run on a GPU, and never in a loader's workers
        torch.cuda.manual_seed_all(seed)
