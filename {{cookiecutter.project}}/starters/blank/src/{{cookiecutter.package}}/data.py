"""Your dataset: `load` returns the training set and the test set."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .config import Config


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Write a dataset of yours here: an item may be a tensor, an array, a number, or a tuple or mapping of such."""

    def __init__(self, path: Path) -> None:
        self.rows = torch.from_numpy(np.load(path))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # what is drawn here at random, by python, numpy or torch, follows from seed, epoch and index
        return self.rows[index, :-1], self.rows[index, -1:]


def load(config: Config) -> tuple[Rows, Rows]:
    """The training set and the test set."""
    folder = Path(config.data.prepared)
    return Rows(folder / "train.npy"), Rows(folder / "test.npy")
