"""The mean error of the predicted levels."""

from torch import Tensor, nn

import samebits as sb

from . import data
from .config import Config
from .model import build


def measure(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum of the absolute differences in a batch."""
    return {"error": (model(batch["levels"], batch["gauge"]) - batch["next"]).abs().double().sum()}


def metrics(model: nn.Module, dataset: data.Tides, stage: sb.Stage[Config]) -> dict[str, float]:
    """The mean absolute difference, the same on every rank."""
    return {"mean_error": sb.sums(measure, model, dataset, stage, batch=64)["error"].item() / len(dataset)}


def evaluate(stage: sb.Stage[Config]) -> None:
    """Evaluate the weights in the run directory."""
    model = build(stage.config).to(stage.device)
    sb.load_weights(model, stage.out)
    _, test_set = data.load(stage.config)
    sb.write_json(stage.out / "evaluation.json", metrics(model, test_set, stage))


if __name__ == "__main__":
    sb.main(evaluate)
