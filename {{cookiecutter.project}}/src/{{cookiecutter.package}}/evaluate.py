"""Yours: how good the weights are, measured in the same way on any number of ranks.

    python -m <package>.evaluate [--set KEY=VALUE ...] [--out DIR]

evaluates DIR/model.safetensors on the test set and writes DIR/evaluation.json.
"""

from pathlib import Path

from .config import Config
from .repro import launch

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(Config)

import torch
from safetensors.torch import load_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import data
from .model import CLASSES, build
from .repro import determinism, manifest
from .repro.errors import Refused
from .repro.files import write_json
from .repro.record import WEIGHTS
from .repro.world import World


@torch.no_grad()
def evaluate(model: nn.Module, dataset: data.Digits, batch: int, world: World) -> tuple[torch.Tensor, float]:
    """Count (true class, predicted class) pairs, shape (10, 10), and the mean loss, over all ranks.

    The dataset is cut into the same batches whatever the world size. Each fills its own slot of a vector
    that is summed over the ranks, so that no sum depends on who computed what.
    """
    batches = torch.arange(len(dataset)).split(batch)
    mine = range(world.rank, len(batches), world.size)
    counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64, device=world.device)
    losses = torch.zeros(len(batches), dtype=torch.float64, device=world.device)
    loader = DataLoader(dataset, batch_sampler=[batches[i].tolist() for i in mine], generator=torch.Generator())
    training = model.training
    model.eval()
    for slot, (images, labels) in zip(mine, loader, strict=True):
        images, labels = images.to(world.device), labels.to(world.device)
        logits = model(images)
        losses[slot] = F.cross_entropy(logits, labels, reduction="sum")
        pairs = torch.bincount(labels * CLASSES + logits.argmax(1), minlength=CLASSES**2)
        counts += pairs.view(CLASSES, CLASSES)
    model.train(training)
    world.sum(counts)
    world.sum(losses)
    return counts, (losses.sum() / len(dataset)).item()


def accuracy(counts: torch.Tensor) -> float:
    """The share of samples on the diagonal of the counts."""
    return counts.diagonal().sum().item() / counts.sum().item()


def stage(config: Config, out: Path) -> None:
    """Evaluate the weights in `out`."""
    determinism.apply(config.determinism)
    manifest.verify(Path(config.data.prepared))
    model = build(config.model)
    _, test_set = data.load(config.data)
    try:
        load_model(model, out / WEIGHTS)
    except FileNotFoundError:
        raise Refused(f"{out / WEIGHTS}: missing. Train first: make repro") from None
    counts, loss = evaluate(model, test_set, config.train.evaluate_batch, World(0, 1, torch.device("cpu")))
    write_json(
        out / "evaluation.json",
        {"accuracy": accuracy(counts), "loss": loss, "confusion": counts.tolist()},
    )
    print(f"accuracy {accuracy(counts):.4f} on {len(test_set)} samples, loss {loss:.4f}")


if __name__ == "__main__":
    launch.call(stage, CONFIG, OUT)
