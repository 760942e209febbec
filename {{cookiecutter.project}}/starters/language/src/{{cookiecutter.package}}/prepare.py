"""From the text to token files: each byte is a token."""

import gzip
from pathlib import Path

import numpy as np

import samebits as sb

from .config import Data


def prepare(config: Data, raw: Path, folder: Path) -> None:
    """Write the sets into `folder`, which is empty. The dataset `raw` has been checked against its SHA-256."""
    tokens = np.frombuffer(gzip.decompress(raw.read_bytes()), np.uint8).astype(np.uint16)
    first = len(tokens) - len(tokens) * config.test_percent // 100
    np.save(folder / "train.npy", tokens[:first])
    np.save(folder / "test.npy", tokens[first:])
    print(f"prepared {folder}: {first} tokens to train on, {len(tokens) - first} to test on")


if __name__ == "__main__":
    sb.main(prepare)
