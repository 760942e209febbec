"""How far predictions are off, in grams."""

import math

from torch import Tensor, nn

import samebits as sb

from . import data
from .config import Config
from .model import build


def measure(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Sums over a batch: squares and sizes of the errors, scaled as the target is."""
    numbers, categories, targets = batch
    errors = (model(numbers, categories) - targets).double()
    return {"squares": errors.square().sum(), "sizes": errors.abs().sum()}


def metrics(model: nn.Module, dataset: data.Table, stage: sb.Stage[Config]) -> dict[str, float]:
    """The metrics by name, the same on every rank."""
    sums = sb.sums(measure, model, dataset, stage, batch=stage.config.train.evaluate_batch)
    squares, sizes = (sums[name].item() / len(dataset) for name in ("squares", "sizes"))
    _, deviation = data.columns(stage.config).target
    return {"rmse": deviation * math.sqrt(squares), "mean_error": deviation * sizes}


def evaluate(stage: sb.Stage[Config]) -> None:
    """Evaluate the weights in the run directory."""
    model = build(stage.config).to(stage.device)
    weights = sb.load_weights(model, stage.out)
    _, test_set = data.load(stage.config)
    sb.write_json(stage.out / "evaluation.json", metrics(model, test_set, stage) | {"weights": weights})


if __name__ == "__main__":
    sb.main(evaluate)
