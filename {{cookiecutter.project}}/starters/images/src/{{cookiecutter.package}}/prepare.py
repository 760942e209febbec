"""From the table of digits to a folder of images per class; for images that you have, set `data.read: both`."""

from pathlib import Path

import numpy as np
from PIL import Image  # pillow: the locks have it

import samebits as sb

from .config import Data


def prepare(config: Data, raw: Path, folder: Path) -> None:
    """Write the sets into `folder`, which is empty. The dataset `raw` has been checked against its SHA-256."""
    table = np.loadtxt(raw, delimiter=",", dtype=np.int64)
    permutation = sb.Permutation(len(table), 0)  # the same for all seeds
    held_out = len(table) * config.test_percent // 100
    for position in range(len(table)):
        place = permutation[position]
        *pixels, label = table[place]
        path = folder / ("test" if position < held_out else "train") / str(label) / f"{place:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((np.array(pixels).reshape(8, 8) * 255 // 16).astype(np.uint8))
        # without compression, whose bytes may depend on the CPU; the pixels do not
        image.resize((config.side, config.side), Image.Resampling.NEAREST).save(path, compress_level=0)
    print(f"prepared {folder}: {len(table) - held_out} images to train on, {held_out} to test on")


if __name__ == "__main__":
    sb.main(prepare)
