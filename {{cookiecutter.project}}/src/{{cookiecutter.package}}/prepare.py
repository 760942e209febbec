"""Yours: from the dataset as it came to train and test splits with a manifest.

python -m <package>.prepare
"""

from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import Config, Data

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import numpy as np

from samebits.address import manifest
from samebits.core.order import Permutation

from . import data

SPLIT = 0  # the key of the split: the same for every seed, so that seeds can be compared


def prepare(config: Data, out: Path) -> None:
    """Check the dataset against its SHA-256 and write `data.prepared`; `out` is not used."""
    manifest.require_raw(config)
    images, labels = data.parse(Path(config.raw))
    permutation = Permutation(len(labels), SPLIT)
    order = [permutation[position] for position in range(len(labels))]
    held_out = len(order) * config.test_percent // 100
    folder = Path(config.prepared)
    folder.mkdir(parents=True, exist_ok=True)
    for name, places in {"test": order[:held_out], "train": order[held_out:]}.items():
        np.save(folder / f"{name}-images.npy", images[places])
        np.save(folder / f"{name}-labels.npy", labels[places])
    manifest.write(folder, requested=config)
    print(f"prepared {folder}: {len(order) - held_out} samples to train on, {held_out} to test on")


if __name__ == "__main__":
    launch.call(PROJECT, prepare, CONFIG, OUT, only="data")
