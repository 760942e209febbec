"""A perceptron over numbers, marks of those that are missing, and an embedding of each category."""

import torch
from torch import Tensor, nn

from . import data
from .config import Config


def embedding(words: int, width: int) -> nn.Embedding:
    """Uniform weights, which every CPU draws alike; row 0 is for a value that is missing or was not learned."""
    return nn.Embedding.from_pretrained(torch.empty(words + 1, width).uniform_(-1, 1), freeze=False)


class Perceptron(nn.Module):
    """(batch, numbers) and (batch, categories) to (batch,) of the target, scaled as `prepare` does."""

    def __init__(self, columns: data.Columns, embed: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(embedding(len(words), embed) for words in columns.words)
        inputs = 2 * len(columns.numbers) + embed * len(columns.words)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """A number that is missing, a NaN, becomes the mean, 0, and a mark says so."""
        missing = numbers.isnan()
        embedded = [embed(column) for embed, column in zip(self.embeddings, categories.unbind(1), strict=True)]
        inputs = torch.cat([numbers.masked_fill(missing, 0), missing.float(), *embedded], 1)
        return self.layers(inputs).squeeze(1)


def build(config: Config) -> nn.Module:
    """The network that `model` in params.yaml describes; its initial weights follow from the generators' state."""
    model = config.model
    return Perceptron(data.columns(config), model.embedding, model.width, model.depth, model.dropout)
