"""Images in folders, one per class, and a pipeline of random transforms, as torchvision has them."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from .config import Config

CLASSES = 10

Transform = Callable[[Tensor], Tensor]  # (3, side, side) of float32 to the same shape


def crop(off: int) -> Transform:
    """Pad by so many pixels and cut the old size out again, somewhere; draws from python's generator."""

    def cropped(image: Tensor) -> Tensor:
        side, (down, right) = image.shape[-1], (random.randint(0, 2 * off) for _ in range(2))
        return F.pad(image, [off] * 4)[:, down : down + side, right : right + side]

    return cropped


def flip(chance: float) -> Transform:
    """Left for right, with this chance; draws from numpy's generator."""
    return lambda image: image.flip(2) if np.random.random() < chance else image


def jitter(by: float) -> Transform:
    """Brightness and each colour times 1 ± `by`; draws from torch's generator."""

    def jittered(image: Tensor) -> Tensor:
        brightness, *colours = 1 + by * (2 * torch.rand(4) - 1)
        return (image * brightness * torch.stack(colours).view(3, 1, 1)).clamp(0, 1)

    return jittered


class Folders(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The images folder/CLASS/*.png, transformed: (3, side, side) of float32 between -1 and 1, and the class."""

    def __init__(self, folder: Path, transforms: Sequence[Transform] = ()) -> None:
        self.paths, self.transforms = sorted(folder.glob("*/*.png")), transforms

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        with Image.open(path) as file:
            image = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1).float() / 255
        for transform in self.transforms:
            image = transform(image)
        return 2 * image - 1, int(path.parent.name)


def load(config: Config) -> tuple[Folders, Folders]:
    """The training set, transformed at random, and the test set, as it is."""
    folder, train = Path(config.data.prepared), config.train
    random_ones = crop(train.crop), flip(train.flip), jitter(train.jitter)
    return Folders(folder / "train", random_ones), Folders(folder / "test")
