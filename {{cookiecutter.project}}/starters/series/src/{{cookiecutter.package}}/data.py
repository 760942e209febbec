"""The digits as series: each is drawn in STEPS rows of VALUES pixels, one after another."""

import random
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from .config import Config

STEPS, VALUES, CLASSES = 8, 8, 10


class Item(TypedDict):
    """What is seen, (STEPS, VALUES) of float32; what is to be foretold, of the same shape; and the class."""

    seen: NDArray[np.float32]
    whole: NDArray[np.float32]
    label: int


def parse(raw: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All samples of the raw file: (n, STEPS, VALUES) pixels of 0 to 16, and (n,) labels below CLASSES."""
    table = np.loadtxt(raw, delimiter=",", dtype=np.int64)
    return table[:, :-1].reshape(-1, STEPS, VALUES).astype(np.uint8), table[:, -1]


class Series(torch.utils.data.Dataset[Item]):
    """Series between 0 and 1; scaled by up to 1 ± `scale`, and each step missing with the chance `skip`."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[np.int64], scale: float = 0, skip: float = 0) -> None:
        self.pixels, self.labels, self.scale, self.skip = pixels, labels, scale, skip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        whole = self.pixels[index].astype(np.float32) / 16
        whole *= np.float32(random.uniform(1 - self.scale, 1 + self.scale))
        kept = np.random.uniform(size=(STEPS, 1)) >= self.skip
        return {"seen": whole * kept.astype(np.float32), "whole": whole, "label": int(self.labels[index])}


def load(config: Config) -> tuple[Series, Series]:
    """The training set, scaled and with steps missing, and the test set, as it is."""
    folder = Path(config.data.prepared)

    def split(name: str, scale: float = 0, skip: float = 0) -> Series:
        return Series(np.load(folder / f"{name}-images.npy"), np.load(folder / f"{name}-labels.npy"), scale, skip)

    return split("train", config.train.scale, config.train.skip), split("test")
