"""How well series are classified and foretold."""

from torch import Tensor, nn

import samebits as sb

from . import data
from .config import Config
from .model import build


def measure(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over a batch: series that are classified right, and the mean error of each one's next steps."""
    output = model(batch["seen"])
    errors = (output.next[:, :-1] - batch["whole"][:, 1:]).abs().mean((1, 2))
    return {"hits": (output.logits.argmax(1) == batch["label"]).sum(), "errors": errors.double().sum()}


def metrics(model: nn.Module, dataset: data.Series, stage: sb.Stage[Config]) -> dict[str, float]:
    """The metrics by name, the same on every rank."""
    sums = sb.sums(measure, model, dataset, stage, batch=stage.config.train.evaluate_batch)
    return {"accuracy": sums["hits"].item() / len(dataset), "next_error": sums["errors"].item() / len(dataset)}


def evaluate(stage: sb.Stage[Config]) -> None:
    """Evaluate the weights in the run directory."""
    model = build(stage.config).to(stage.device)
    weights = sb.load_weights(model, stage.out)
    _, test_set = data.load(stage.config)
    sb.write_json(stage.out / "evaluation.json", metrics(model, test_set, stage) | {"weights": weights})


if __name__ == "__main__":
    sb.main(evaluate)
