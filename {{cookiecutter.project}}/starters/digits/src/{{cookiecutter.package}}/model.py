"""Yours: the network. `build` returns the one that params.yaml names.

Initial values are uniform or constant: the functions behind normal deviates differ between CPUs in
their last bit.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Config
from .data import CLASSES, SIDE

STRIDE, HEAD_WIDTH = 2, 16


class ConvNet(nn.Module):
    """Blocks of 3x3 convolution, batch normalisation and ReLU, halving the side after the first."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block in range(depth):
            inputs, stride = (1, 1) if block == 0 else (width, 2 if block == 1 else 1)
            layers += [
                nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        side = SIDE if depth == 1 else SIDE // 2
        self.head = nn.Linear(width * side * side, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, SIDE, SIDE) float32 images in [0, 1] to (batch, CLASSES) logits."""
        return self.head(self.dropout(self.features(images).flatten(1)))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.mix(attended))
        return x + self.dropout(self.perceptron(self.norm_perceptron(x)))


class Transformer(nn.Module):
    """A vision transformer: overlapping 3x3 patches, learned positions, all tokens classified together."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        tokens = (SIDE // STRIDE) ** 2
        self.embed = nn.Conv2d(1, width, 3, STRIDE, padding=1)
        self.position = nn.Parameter(torch.empty(tokens, width).uniform_(-0.5, 0.5))
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(tokens * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, SIDE, SIDE) float32 images in [0, 1] to (batch, CLASSES) logits."""
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = self.blocks(patches + self.position)
        return self.head(self.norm(tokens).flatten(1))


MODELS = {"convnet": ConvNet, "transformer": Transformer}


def build(config: Config) -> nn.Module:
    """The network that `model` in params.yaml describes; its initial weights follow from the generators' state."""
    model = config.model
    return MODELS[model.name](model.width, model.depth, model.dropout)
