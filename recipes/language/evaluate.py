"""How well the held-out text is foretold.

python -m <package>.evaluate [--set KEY=VALUE ...] [--out DIR]
"""

from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import Config

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import math

import torch
from torch import nn
from torch.nn import functional as F

from samebits.base.files import write_json
from samebits.checkpoint.final import load_weights
from samebits.core.evaluation import count_batches, evaluating
from samebits.core.ranks import World
from samebits.run import alone

from . import data
from .model import build


def evaluate(model: nn.Module, dataset: data.Windows, config: Config, world: World) -> dict[str, float]:
    """The perplexity per byte, the same on every rank."""
    size = config.train.evaluate_batch
    losses = torch.zeros(count_batches(dataset, size), dtype=torch.float64, device=world.device)
    with evaluating(model, dataset, size, config.seed, world) as batches:
        for number, batch in batches:
            losses[number] = F.cross_entropy(
                model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
            )
    world.sum(losses)
    return {"perplexity": math.exp(losses.sum().item() / (len(dataset) * dataset.context))}


def stage(config: Config, out: Path) -> None:
    """Evaluate the weights in `out`."""
    world = alone(config)
    model = build(config).to(world.device)
    weights = load_weights(model, out)
    _, test_set = data.load(config)
    write_json(out / "evaluation.json", evaluate(model, test_set, config, world) | {"weights": weights})


if __name__ == "__main__":
    launch.call(PROJECT, stage, CONFIG, OUT)
