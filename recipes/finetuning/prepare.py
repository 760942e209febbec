"""From the raw file to training and test sets of digits that lie on their side; the weights to start from go with them.

python -m <package>.prepare
"""

from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import BASE, Config, Data

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import numpy as np
from safetensors.torch import load_file, save_file

from samebits.address import manifest
from samebits.core.order import Permutation

from . import data

SPLIT = 0  # the key of the split: the same for every seed, so that seeds can be compared


def prepare(config: Data, out: Path) -> None:
    """Check the raw file and the base against their SHA-256 and write `data.prepared`; `out` is not used."""
    raw, base, folder = Path(config.raw), Path(config.base), Path(config.prepared)
    manifest.require_raw(config)
    manifest.require(base, config.base_sha256, "Copy the weights of the run there that you start from, see params.yaml")
    images, labels = data.parse(raw)
    images = np.ascontiguousarray(np.rot90(images, axes=(1, 2)))
    permutation = Permutation(len(labels), SPLIT)
    order = [permutation[position] for position in range(len(labels))]
    held_out = len(order) * config.test_percent // 100
    folder.mkdir(parents=True, exist_ok=True)
    for name, places in {"test": order[:held_out], "train": order[held_out:]}.items():
        np.save(folder / f"{name}-images.npy", images[places])
        np.save(folder / f"{name}-labels.npy", labels[places])
    save_file(load_file(base), folder / BASE)  # a new base is a new base_sha256, so DVC prepares again
    manifest.write(folder, requested=config)
    print(f"prepared {folder}: {len(order) - held_out} samples to train on, {held_out} to test on, and the base")


if __name__ == "__main__":
    launch.call(PROJECT, prepare, CONFIG, OUT, only="data")
