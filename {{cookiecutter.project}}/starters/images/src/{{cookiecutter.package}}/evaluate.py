"""How many images are classified right."""

from torch import Tensor, nn
from torch.nn import functional as F

import samebits as sb

from . import data
from .config import Config
from .model import build


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Sums over a batch: images that are classified right, and the loss."""
    images, labels = batch
    logits = model(images)
    return {"hits": (logits.argmax(1) == labels).sum(), "loss": F.cross_entropy(logits, labels, reduction="sum")}


def metrics(model: nn.Module, dataset: data.Folders, stage: sb.Stage[Config]) -> dict[str, float]:
    """The metrics by name, the same on every rank."""
    sums = sb.sums(measure, model, dataset, stage, batch=stage.config.train.evaluate_batch)
    return {"accuracy": sums["hits"].item() / len(dataset), "test_loss": sums["loss"].item() / len(dataset)}


def evaluate(stage: sb.Stage[Config]) -> None:
    """Evaluate the weights in the run directory."""
    model = build(stage.config).to(stage.device)
    weights = sb.load_weights(model, stage.out)
    _, test_set = data.load(stage.config)
    sb.write_json(stage.out / "evaluation.json", metrics(model, test_set, stage) | {"weights": weights})


if __name__ == "__main__":
    sb.main(evaluate)
