"""The training loop: so many steps of SGD, whatever the epochs."""

from pathlib import Path

from samebits.start import launch

from . import PROJECT
from .config import Config

if __name__ == "__main__":
    CONFIG, OUT = launch.begin(PROJECT, Config, trains=True)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samebits.run import Run

from . import data
from .evaluate import evaluate
from .model import build


def train(config: Config, out: Path) -> None:
    """One run, from config to receipt."""
    with Run(PROJECT, config, out) as run:
        train_set, test_set = data.load(config)
        model = build(config).to(run.world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.rate.first, momentum=config.train.momentum)
        for step in run.steps(model, optimizer, train_set, steps=config.train.steps):
            loss = step.backward(micro_batch_loss)
            share = step.number / step.of
            optimizer.param_groups[0]["lr"] = config.rate.first * (1 - share) + config.rate.last * share
            optimizer.step()
            step.log(loss=loss)
            if (step.number + 1) % config.train.evaluate_every == 0 and not step.is_last:
                step.log(mean_error=evaluate(model, test_set, config, run.world))
        run.finish(mean_error=evaluate(model, test_set, config, run.world))


def micro_batch_loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of one micro-batch, a scalar."""
    return F.mse_loss(network(batch["levels"], batch["gauge"]), batch["next"])


if __name__ == "__main__":
    launch.call(PROJECT, train, CONFIG, OUT)
