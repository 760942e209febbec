"""Windows of a token file that is mapped into memory, not read: it may be larger than memory."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .config import Config

TOKENS = 256  # byte values


class Windows(torch.utils.data.Dataset[Tensor]):
    """`context` + 1 tokens, (context + 1,) of int64, from each `stride`-th token on."""

    def __init__(self, path: Path, context: int, stride: int) -> None:
        self.tokens, self.context, self.stride = np.load(path, mmap_mode="r"), context, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.context - 1) // self.stride + 1

    def __getitem__(self, index: int) -> Tensor:
        first = index * self.stride
        return torch.from_numpy(self.tokens[first : first + self.context + 1].astype(np.int64))


def load(config: Config) -> tuple[Windows, Windows]:
    """The training set, with a window at each token, and the test set, with one beside the other."""
    folder, context = Path(config.data.prepared), config.model.context
    return Windows(folder / "train.npy", context, 1), Windows(folder / "test.npy", context, context)
