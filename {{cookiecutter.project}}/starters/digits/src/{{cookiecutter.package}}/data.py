"""Yours: the dataset. Bring your own by changing this file, and `data` in params.yaml.

A dataset needs `__len__` and `__getitem__`. Transforms may draw from python's, numpy's or torch's
global generator as they like: each item is seeded by (seed, epoch, index) before it is made.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from .config import Config

SIDE, CLASSES = 8, 10  # pixels in a row and in a column; digits


def parse(raw: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All samples of the raw file: (n, SIDE, SIDE) images of 0 to 16, and (n,) labels below CLASSES."""
    table = np.loadtxt(raw, delimiter=",", dtype=np.int64)
    return table[:, :-1].reshape(-1, SIDE, SIDE).astype(np.uint8), table[:, -1]


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A (1, SIDE, SIDE) float32 image in [0, 1], shifted by up to `shift` pixels, and its label."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64], shift: int = 0) -> None:
        self.images, self.labels, self.shift = images, labels, shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index]).float().unsqueeze(0) / 16
        if self.shift:
            down, right = torch.randint(2 * self.shift + 1, (2,)).tolist()
            image = F.pad(image, [self.shift] * 4)[:, down : down + SIDE, right : right + SIDE]
        return image, int(self.labels[index])


def load(config: Config) -> tuple[Digits, Digits]:
    """The training set, with random shifts, and the test set, without."""
    folder = Path(config.data.prepared)

    def split(name: str, shift: int) -> Digits:
        return Digits(np.load(folder / f"{name}-images.npy"), np.load(folder / f"{name}-labels.npy"), shift)

    return split("train", config.train.shift), split("test", 0)
