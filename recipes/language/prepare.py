"""From the text to token files: each byte is a token.

python -m <package>.prepare
"""

import gzip
from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import Config, Data

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import numpy as np

from samebits.address import manifest


def prepare(config: Data, out: Path) -> None:
    """Check the raw file against its SHA-256 and write `data.prepared`; `out` is not used."""
    raw, folder = Path(config.raw), Path(config.prepared)
    manifest.require_raw(config)
    tokens = np.frombuffer(gzip.decompress(raw.read_bytes()), np.uint8).astype(np.uint16)
    first = len(tokens) - len(tokens) * config.test_percent // 100
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "train.npy", tokens[:first])
    np.save(folder / "test.npy", tokens[first:])
    manifest.write(folder, requested=config)
    print(f"prepared {folder}: {first} tokens to train on, {len(tokens) - first} to test on")


if __name__ == "__main__":
    launch.call(PROJECT, prepare, CONFIG, OUT, only="data")
