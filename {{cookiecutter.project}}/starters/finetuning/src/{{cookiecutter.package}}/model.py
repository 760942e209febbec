"""A network with the weights of an earlier run, and adapters that are trained in their place."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from .config import BASE, Config
from .data import CLASSES, SIDE
from .lora import adapt


class ConvNet(nn.Module):
    """The base: blocks of 3x3 convolution, batch normalisation and ReLU, halving the side after the first."""

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


def build(config: Config) -> nn.Module:
    """The base with its weights, which the manifest of the prepared data vouches for, and new adapters."""
    model = config.model
    base = ConvNet(model.width, model.depth, model.dropout)
    base.load_state_dict(load_file(Path(config.data.prepared) / BASE))
    return adapt(base, model.rank, model.scale)
