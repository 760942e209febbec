"""Every random number of a run is a pure function of the root seed and of what it is for."""

import hashlib
import json

# purpose -> what its ids are. A purpose outside this table is a typo, so it is refused.
PURPOSES = {
    "init": (),
    "order": ("epoch",),
    "sample": ("epoch", "index"),
    "shard": ("step", "shard"),
}


def derive(root: int, purpose: str, *ids: int) -> int:
    """Hash (root, purpose, ids) to a seed in [0, 2**64).

    Hashing keeps the streams apart where arithmetic such as `seed + rank` makes them collide.

    Raises:
        ValueError: an unknown purpose, or a wrong number of ids for it.
    """
    if purpose not in PURPOSES or len(ids) != len(PURPOSES[purpose]):
        raise ValueError(f"derive(root, {purpose!r}, *{ids}): wanted one of {PURPOSES}")
    text = json.dumps([root, purpose, *ids])  # JSON is unambiguous: no two argument lists share a text
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
