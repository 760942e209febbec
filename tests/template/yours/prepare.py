"""From the table of levels to early and late hours."""

from pathlib import Path

import numpy as np

import samebits as sb

from .config import Data


def prepare(config: Data, raw: Path, folder: Path) -> None:
    """Write the hours into `folder`, which is empty. The dataset `raw` has been checked against its SHA-256."""
    levels = np.loadtxt(raw, delimiter="\t", dtype=np.float32, skiprows=1)
    early = len(levels) - int(len(levels) * config.held_out)
    np.save(folder / "early.npy", levels[:early])
    np.save(folder / "late.npy", levels[early:])


if __name__ == "__main__":
    sb.main(prepare)
