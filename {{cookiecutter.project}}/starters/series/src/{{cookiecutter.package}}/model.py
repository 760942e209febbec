"""A recurrent network: a frozen part before it, a head without parameters behind it, and another that foretells."""

from typing import NamedTuple

from torch import Tensor, nn

from .config import Config
from .data import CLASSES, VALUES

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


class Output(NamedTuple):
    """(batch, CLASSES) logits; (batch, STEPS, VALUES) of the next step; (batch, STEPS, width) features."""

    logits: Tensor
    next: Tensor
    features: Tensor


class Reader(nn.Module):
    """(batch, STEPS, VALUES) series to an `Output`."""

    def __init__(self, cell: str, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.spread = nn.Linear(VALUES, width).requires_grad_(False)  # random features, which stay as they are drawn
        self.recurrent = CELLS[cell](width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.foretell = nn.Linear(width, VALUES)

    def forward(self, series: Tensor) -> Output:
        """The logit of a class is the mean of its share of the last step's features."""
        features, _ = self.recurrent(self.spread(series).relu())
        logits = 10 * features[:, -1].unflatten(1, (CLASSES, -1)).mean(2)
        return Output(logits, self.foretell(features), features)


def build(config: Config) -> nn.Module:
    """The network that `model` in params.yaml describes; its initial weights follow from the generators' state."""
    model = config.model
    return Reader(model.cell, model.width, model.layers, model.dropout)
