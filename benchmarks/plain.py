"""A plain PyTorch script on the project's model, data and loop, as a training of the parts: see peers.py.

    python plain.py PACKAGE ARGUMENTS-OF-TRAIN

It leaves what is read of a run: trace/rank0000.jsonl with the time at which each step ended, and peak.json.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import peers
from sharing import write_peak


class Noted:
    """In place of a pace: the time at which each step begins is that at which the one before has ended."""

    def __init__(self, out: Path) -> None:
        self._rows, self._steps = (out / "trace" / "rank0000.jsonl").open("w", buffering=1), 0

    def begins(self) -> None:
        """A step begins."""
        if self._steps:
            print(json.dumps({"monotonic": time.monotonic()}), file=self._rows)
        self._steps += 1


def main() -> None:
    """Train as the arguments ask, as long as the project would."""
    package, *words = sys.argv[1:]
    at = words.index("--out")
    out, settings = Path(words[at + 1]), [word for word in words[:at] if word != "--set"]
    config: Any = import_module(f"{package}.repro.config.params").load(
        import_module(f"{package}.config").Config, overrides=settings
    )
    (out / "trace").mkdir(parents=True)
    peers.train_by(peers.PEERS[peers.PLAIN](config), config, Noted(out), import_module(f"{package}.train"))
    write_peak(out)
    sys.stdout.flush()
    os._exit(0)  # workers of a loader that is not at its end would be waited for


if __name__ == "__main__":
    main()
