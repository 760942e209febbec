"""Yours: from the dataset as it came to training and test sets. `samebits prepare` runs it."""

from pathlib import Path

import numpy as np

import samebits as sb

from . import data
from .config import Data


def prepare(config: Data, raw: Path, folder: Path) -> None:
    """Write the sets into `folder`, which is empty. The dataset `raw` has been checked against its SHA-256."""
    images, labels = data.parse(raw)
    order = sb.Permutation(len(labels), 0).items(np.arange(len(labels)))  # the same for all seeds
    held_out = len(order) * config.test_percent // 100
    for name, places in {"test": order[:held_out], "train": order[held_out:]}.items():
        np.save(folder / f"{name}-images.npy", images[places])
        np.save(folder / f"{name}-labels.npy", labels[places])
    print(f"prepared {folder}: {len(order) - held_out} samples to train on, {held_out} to test on")


if __name__ == "__main__":
    sb.main(prepare)
