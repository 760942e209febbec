"""The mean error of the predicted levels."""

from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import Config

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import torch
from torch import nn

from samebits.base.files import write_json
from samebits.checkpoint.final import load_weights
from samebits.core.evaluation import count_batches, evaluating
from samebits.core.ranks import World
from samebits.run import alone

from . import data
from .model import build

BATCH = 64


def evaluate(model: nn.Module, dataset: data.Tides, config: Config, world: World) -> float:
    """The mean absolute difference, the same on every rank."""
    sums = torch.zeros(count_batches(dataset, BATCH), dtype=torch.float64, device=world.device)
    with evaluating(model, dataset, BATCH, config.seed, world) as batches:
        for number, batch in batches:
            sums[number] = (model(batch["levels"], batch["gauge"]) - batch["next"]).abs().double().sum()
    world.sum(sums)
    return (sums.sum() / len(dataset)).item()


def stage(config: Config, out: Path) -> None:
    """Evaluate the weights in `out`."""
    world = alone(config)
    model = build(config).to(world.device)
    load_weights(model, out)
    _, test_set = data.load(config)
    write_json(out / "evaluation.json", {"mean_error": evaluate(model, test_set, config, world)})


if __name__ == "__main__":
    launch.call(PROJECT, stage, CONFIG, OUT)
