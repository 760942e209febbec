"""From the raw file to training and test sets of digits that lie on their side, and the weights to start from."""

from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

import samebits as sb

from . import data
from .config import BASE, Data


def prepare(config: Data, raw: Path, folder: Path) -> None:
    """Write the sets into `folder`, which is empty. The dataset `raw` has been checked against its SHA-256."""
    sb.require_sha256(
        Path(config.base), config.base_sha256, "Copy the weights of the run there that you start from, see params.yaml"
    )
    images, labels = data.parse(raw)
    images = np.ascontiguousarray(np.rot90(images, axes=(1, 2)))
    order = sb.Permutation(len(labels), 0).items(np.arange(len(labels)))  # the same for all seeds
    held_out = len(order) * config.test_percent // 100
    for name, places in {"test": order[:held_out], "train": order[held_out:]}.items():
        np.save(folder / f"{name}-images.npy", images[places])
        np.save(folder / f"{name}-labels.npy", labels[places])
    save_file(load_file(config.base), folder / BASE)  # a new base is a new base_sha256, so DVC prepares again
    print(f"prepared {folder}: {len(order) - held_out} samples to train on, {held_out} to test on, and the base")


if __name__ == "__main__":
    sb.main(prepare)
