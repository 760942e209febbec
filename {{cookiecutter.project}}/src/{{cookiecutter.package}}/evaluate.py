"""Yours: the quality of the weights, measured in the same way on any number of ranks.

    python -m <package>.evaluate [--set KEY=VALUE ...] [--out DIR]

evaluates DIR/model.safetensors on the test set and writes DIR/evaluation.json, and for `dvc plots` DIR/confusion.csv.
"""

from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import Config

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config)

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from samebits.base.files import write_json
from samebits.checkpoint.final import load_weights
from samebits.core.evaluation import count_batches, evaluating
from samebits.core.ranks import World
from samebits.run import alone

from . import data
from .data import CLASSES
from .model import build


def evaluate(
    model: nn.Module, dataset: data.Digits, config: Config, world: World
) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics by name, and the counts of (true class, predicted class) pairs: (CLASSES, CLASSES), int64.

    Every rank gets those of the whole dataset. Each batch fills a slot of its own in a vector that is summed over the
    ranks, so no sum depends on the rank that computed a batch.
    """
    batch = config.train.evaluate_batch
    counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64, device=world.device)
    losses = torch.zeros(count_batches(dataset, batch), dtype=torch.float64, device=world.device)
    with evaluating(model, dataset, batch, config.seed, world) as batches:
        for number, (images, labels) in batches:
            logits = model(images)
            losses[number] = F.cross_entropy(logits, labels, reduction="sum")
            pairs = torch.bincount(labels * CLASSES + logits.argmax(1), minlength=CLASSES**2)
            counts += pairs.view(CLASSES, CLASSES)
    world.sum(counts)
    world.sum(losses)
    accuracy = counts.diagonal().sum().item() / counts.sum().item()
    return {"accuracy": accuracy, "test_loss": (losses.sum() / len(dataset)).item()}, counts


def stage(config: Config, out: Path) -> None:
    """Evaluate the weights in `out`."""
    world = alone(config)
    model = build(config).to(world.device)
    _, test_set = data.load(config)
    weights = load_weights(model, out)
    metrics, counts = evaluate(model, test_set, config, world)
    write_json(out / "evaluation.json", {**metrics, "weights": weights, "confusion": counts.tolist()})
    pairs = [
        f"{actual},{predicted}\n" * int(counts[actual, predicted]) for actual, predicted in np.ndindex(*counts.shape)
    ]
    (out / "confusion.csv").write_text("actual,predicted\n" + "".join(pairs))
    print(f"{len(test_set)} samples:", "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


if __name__ == "__main__":
    launch.call(PROJECT, stage, CONFIG, OUT)
