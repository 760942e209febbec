"""The training loop: so many steps of SGD, whatever the epochs."""

import torch
from torch.nn import functional as F

import samebits as sb

from . import data
from .config import Config
from .evaluate import metrics
from .model import build


def train(run: sb.Run[Config]) -> None:
    """One run, from config to receipt."""
    train_set, test_set = data.load(run.config)
    model = build(run.config).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config.rate.first, momentum=run.config.train.momentum)
    for step in run.steps(model, optimizer, train_set, steps=run.config.train.steps):
        for batch in step:
            step.backward(F.mse_loss(model(batch["levels"], batch["gauge"]), batch["next"]))
        share = step.number / step.of
        optimizer.param_groups[0]["lr"] = run.config.rate.first * (1 - share) + run.config.rate.last * share
        optimizer.step()
        step.log(loss=step.loss)
        if (step.number + 1) % run.config.train.evaluate_every == 0 and not step.is_last:
            step.log(**metrics(model, test_set, run))
    run.finish(**metrics(model, test_set, run))


if __name__ == "__main__":
    sb.main(train)
