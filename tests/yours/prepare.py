"""From the table of levels to early and late hours.

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


def prepare(config: Data, out: Path) -> None:
    """Check the raw file against its SHA-256 and write `data.prepared`; `out` is not used."""
    manifest.require_raw(config)
    levels = np.loadtxt(config.raw, delimiter="\t", dtype=np.float32, skiprows=1)
    early = len(levels) - int(len(levels) * config.held_out)
    folder = Path(config.prepared)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "early.npy", levels[:early])
    np.save(folder / "late.npy", levels[early:])
    manifest.write(folder, requested=config)


if __name__ == "__main__":
    launch.call(PROJECT, prepare, CONFIG, OUT, only="data")
