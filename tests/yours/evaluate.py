"""The mean error of the predicted levels."""

from pathlib import Path

from . import PROJECT
from .config import Config
from .repro import launch

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import torch
from torch import nn

from . import data
from .model import build
from .repro.files import write_json
from .repro.run import alone, load_weights
from .repro.training.sampling import on_device
from .repro.training.world import World


@torch.no_grad()
def evaluate(model: nn.Module, dataset: data.Tides, world: World) -> float:
    """The mean absolute difference; every rank computes it over the whole dataset."""
    model.eval()
    batch = torch.utils.data.default_collate([dataset[index] for index in range(len(dataset))])
    batch = on_device(batch, world.device)
    errors = (model(batch["levels"], batch["gauge"]) - batch["next"]).abs()
    model.train()
    return errors.double().mean().item()


def stage(config: Config, out: Path) -> None:
    """Evaluate the weights in `out`."""
    world = alone(config)
    model = build(config).to(world.device)
    load_weights(model, out)
    _, test_set = data.load(config.data)
    write_json(out / "evaluation.json", {"mean_error": evaluate(model, test_set, world)})


if __name__ == "__main__":
    launch.call(PROJECT, stage, CONFIG, OUT)
