"""From the table of digits to a folder of images per class. Of images that you have, only write the manifest.

python -m <package>.prepare
"""

from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import Config, Data

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import numpy as np
from PIL import Image  # pillow: the locks have it

from samebits.address import manifest
from samebits.core.order import Permutation

SPLIT = 0  # the key of the split: the same for every seed, so that seeds can be compared


def prepare(config: Data, out: Path) -> None:
    """Check the raw file against its SHA-256 and write `data.prepared`; `out` is not used."""
    raw, folder = Path(config.raw), Path(config.prepared)
    manifest.require_raw(config)
    table = np.loadtxt(raw, delimiter=",", dtype=np.int64)
    permutation = Permutation(len(table), SPLIT)
    held_out = len(table) * config.test_percent // 100
    for position in range(len(table)):
        place = permutation[position]
        *pixels, label = table[place]
        path = folder / ("test" if position < held_out else "train") / str(label) / f"{place:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((np.array(pixels).reshape(8, 8) * 255 // 16).astype(np.uint8))
        # without compression, whose bytes may depend on the CPU; the pixels do not
        image.resize((config.side, config.side), Image.Resampling.NEAREST).save(path, compress_level=0)
    manifest.write(folder, requested=config)
    print(f"prepared {folder}: {len(table) - held_out} images to train on, {held_out} to test on")


if __name__ == "__main__":
    launch.call(PROJECT, prepare, CONFIG, OUT, only="data")
