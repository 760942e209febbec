"""Trains a model with tied embeddings, unsharded and sharded: test_starters.py runs this in the starter language.

    REPRO_PROJECT=… python tied.py FOLDER

prints, for each world, what a rank holds, the SHA-256 of the weights and of the trace, and what the run said of shards.
"""

import hashlib
import sys
from pathlib import Path

from warm import Warm

WORLDS = ("none", None), ("full", 2)
KEYS = "train.steps=2", "tracking.enabled=false"
SHARDED = "99.5% of the weights are sharded"


if __name__ == "__main__":
    for shard, ranks in WORLDS:
        keys = [word for key in (*KEYS, f"parallel.shard={shard}") for word in ("--set", key)]
        out = Path(sys.argv[1], f"{shard}-{ranks}")
        message = out.with_suffix(".err")
        if Warm(*keys, "--out", str(out), out=message, err=message, ranks=ranks).wait():
            sys.exit(message.read_text())
        written = (out / name for name in ("model.safetensors", "trace/steps.bin"))
        print(
            shard, *(hashlib.sha256(path.read_bytes()).hexdigest() for path in written), SHARDED in message.read_text()
        )
