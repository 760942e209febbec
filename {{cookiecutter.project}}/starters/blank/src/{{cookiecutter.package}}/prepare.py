"""Your data, from the file that you have to what a training reads. `samebits prepare` runs it."""

from pathlib import Path

import numpy as np

import samebits as sb

from .config import Data


def prepare(config: Data, raw: Path, folder: Path) -> None:
    """Write what data.py reads into `folder`; `raw` is the file, or folder, that `data.raw` names."""
    rows = np.loadtxt(raw, delimiter=",", dtype=np.float32)  # read yours here, whatever it is
    held_out = len(rows) * config.test_percent // 100  # sb.Permutation shuffles first, if need be
    np.save(folder / "test.npy", rows[:held_out])
    np.save(folder / "train.npy", rows[held_out:])


if __name__ == "__main__":
    sb.main(prepare)
