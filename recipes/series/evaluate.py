"""How well series are classified and foretold.

python -m <package>.evaluate [--set KEY=VALUE ...] [--out DIR]
"""

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


def evaluate(model: nn.Module, dataset: data.Series, config: Config, world: World) -> dict[str, float]:
    """The metrics by name, the same on every rank."""
    size = config.train.evaluate_batch
    sums = torch.zeros(count_batches(dataset, size), 2, dtype=torch.float64, device=world.device)
    with evaluating(model, dataset, size, config.seed, world) as batches:
        for number, batch in batches:
            output = model(batch["seen"])
            errors = (output.next[:, :-1] - batch["whole"][:, 1:]).abs().mean((1, 2))
            sums[number, 0] = (output.logits.argmax(1) == batch["label"]).sum()
            sums[number, 1] = errors.double().sum()
    world.sum(sums)
    accuracy, error = (sums.sum(0) / len(dataset)).tolist()
    return {"accuracy": accuracy, "next_error": error}


def stage(config: Config, out: Path) -> None:
    """Evaluate the weights in `out`."""
    world = alone(config)
    model = build(config).to(world.device)
    weights = load_weights(model, out)
    _, test_set = data.load(config)
    write_json(out / "evaluation.json", evaluate(model, test_set, config, world) | {"weights": weights})


if __name__ == "__main__":
    launch.call(PROJECT, stage, CONFIG, OUT)
