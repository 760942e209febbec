"""Yours: the quality of the weights, the same on any number of ranks. `samebits evaluate` runs it."""

from torch import Tensor, nn
from torch.nn import functional as F

import samebits as sb

from . import data
from .config import Config
from .model import build


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Sums over a batch: its loss, and how often each pair (true class, predicted class) is met, (CLASSES, CLASSES)."""
    images, labels = batch
    logits = model(images)
    pairs = (labels * data.CLASSES + logits.argmax(1)).bincount(minlength=data.CLASSES**2)
    return {"loss": F.cross_entropy(logits, labels, reduction="sum"), "pairs": pairs.view(data.CLASSES, data.CLASSES)}


def metrics(model: nn.Module, dataset: data.Digits, stage: sb.Stage[Config]) -> tuple[dict[str, float], Tensor]:
    """The metrics by name, and the counts of pairs."""
    sums = sb.sums(measure, model, dataset, stage, batch=stage.config.train.evaluate_batch)
    hits = sums["pairs"].diagonal().sum().item()
    return {"accuracy": hits / len(dataset), "test_loss": sums["loss"].item() / len(dataset)}, sums["pairs"]


def evaluate(stage: sb.Stage[Config]) -> None:
    """Write evaluation.json into the run directory, and for `dvc plots` confusion.csv."""
    model = build(stage.config).to(stage.device)
    weights = sb.load_weights(model, stage.out)
    measured, pairs = metrics(model, data.load(stage.config)[1], stage)
    sb.write_json(stage.out / "evaluation.json", {**measured, "weights": weights, "confusion": pairs.tolist()})
    rows = [f"{actual},{each}\n" * count for actual, row in enumerate(pairs.tolist()) for each, count in enumerate(row)]
    (stage.out / "confusion.csv").write_text("actual,predicted\n" + "".join(rows))
    print(f"{pairs.sum()} samples:", "  ".join(f"{name} {value:.4f}" for name, value in measured.items()))


if __name__ == "__main__":
    sb.main(evaluate)
