"""The level of the sea in the next hour, from those of the hours before."""

import random
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from .config import Config

GAUGES = 3


class Item(TypedDict):
    """The levels of some hours, (hours,) of float32; the gauge; the level to predict, (1,) of float32."""

    levels: NDArray[np.float32]
    gauge: int
    next: NDArray[np.float32]


class Tides(torch.utils.data.Dataset[Item]):
    """A window of `hours` at each gauge and hour; with `noise` in the levels, and sometimes upside down."""

    def __init__(self, levels: NDArray[np.float32], hours: int, noise: float = 0) -> None:
        self.levels, self.hours, self.noise = levels, hours, noise

    def __len__(self) -> int:
        return GAUGES * (len(self.levels) - self.hours)

    def __getitem__(self, index: int) -> Item:
        gauge, start = index % GAUGES, index // GAUGES
        window = self.levels[start : start + self.hours + 1, gauge].copy()
        if self.noise:
            window[:-1] += np.random.uniform(-self.noise, self.noise, self.hours).astype(np.float32)
            window *= random.choice((-1, 1))
        return {"levels": window[:-1], "gauge": gauge, "next": window[-1:]}


def load(config: Config) -> tuple[Tides, Tides]:
    """The early hours to train on, the late ones to test on."""
    data = config.data
    early, late = (np.load(Path(data.prepared) / f"{name}.npy") for name in ("early", "late"))
    return Tides(early, data.hours, data.noise), Tides(late, data.hours)
