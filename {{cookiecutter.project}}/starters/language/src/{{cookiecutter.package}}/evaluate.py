"""How well the held-out text is foretold."""

import math

from torch import Tensor, nn
from torch.nn import functional as F

import samebits as sb

from . import data
from .config import Config
from .model import build


def measure(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The loss of all tokens of a batch."""
    logits = model(batch[:, :-1]).flatten(0, 1)
    return {"loss": F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum")}


def metrics(model: nn.Module, dataset: data.Windows, stage: sb.Stage[Config]) -> dict[str, float]:
    """The perplexity per byte, the same on every rank."""
    sums = sb.sums(measure, model, dataset, stage, batch=stage.config.train.evaluate_batch)
    mean = sums["loss"].item() / (len(dataset) * dataset.context)
    return {"perplexity": math.exp(mean)}  # audit: fine, no weight depends on it


def evaluate(stage: sb.Stage[Config]) -> None:
    """Evaluate the weights in the run directory."""
    model = build(stage.config).to(stage.device)
    weights = sb.load_weights(model, stage.out)
    _, test_set = data.load(stage.config)
    sb.write_json(stage.out / "evaluation.json", metrics(model, test_set, stage) | {"weights": weights})


if __name__ == "__main__":
    sb.main(evaluate)
