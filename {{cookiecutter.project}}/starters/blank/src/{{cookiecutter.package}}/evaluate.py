"""Your metrics. `samebits evaluate` runs it on the weights of a run."""

from torch import Tensor, nn

import samebits as sb

from . import data
from .config import Config
from .model import build


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Sums over a batch, by name: whatever your metrics are made of."""
    inputs, targets = batch
    return {"errors": (model(inputs) - targets).abs().double().sum()}


def metrics(model: nn.Module, dataset: data.Rows, stage: sb.Stage[Config]) -> dict[str, float]:
    """The metrics by name, from the sums over the dataset, which are the same on any number of ranks."""
    sums = sb.sums(measure, model, dataset, stage, batch=64)
    return {"mean_error": sums["errors"].item() / len(dataset)}


def evaluate(stage: sb.Stage[Config]) -> None:
    """Evaluate the weights in the run directory."""
    model = build(stage.config).to(stage.device)
    weights = sb.load_weights(model, stage.out)
    _, test_set = data.load(stage.config)
    sb.write_json(stage.out / "evaluation.json", metrics(model, test_set, stage) | {"weights": weights})


if __name__ == "__main__":
    sb.main(evaluate)
