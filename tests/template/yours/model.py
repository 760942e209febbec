"""A perceptron that knows the gauge."""

import itertools

import torch
from torch import Tensor, nn

from .config import Config
from .data import GAUGES


class Perceptron(nn.Module):
    """(batch, hours) levels and (batch,) gauges to (batch, 1) levels."""

    def __init__(self, hours: int, hidden: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.offset = nn.Embedding(GAUGES, hours)
        sizes = [hours, *hidden]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(sizes[-1], 1)

    def forward(self, levels: Tensor, gauge: Tensor) -> Tensor:
        """The level of the next hour."""
        hidden = levels + self.offset(gauge)
        for layer in self.layers:
            hidden = self.dropout(torch.tanh(layer(hidden)))
        return self.last(hidden)


def build(config: Config) -> nn.Module:
    """The one network of this project."""
    return Perceptron(config.data.hours, config.model.hidden, config.model.dropout)
