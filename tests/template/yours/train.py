"""The training loop: SGD until no evaluation brings a smaller error; the best weights are the result."""

import torch
from torch.nn import functional as F

import samebits as sb

from . import data
from .config import Config
from .evaluate import metrics
from .model import build


def train(run: sb.Run[Config]) -> None:
    """One run, from config to receipt."""
    settings = run.config.train
    train_set, test_set = data.load(run.config)
    model = build(run.config).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate.first, momentum=settings.momentum)

    best, patience = sb.Best(model, higher=False), sb.Patience(settings.patience, higher=False)
    kept = {"best": best, "patience": patience}  # in each checkpoint
    for step in run.steps(model, optimizer, train_set, steps=settings.steps, state=kept):
        for batch in step:
            step.backward(F.mse_loss(model(batch["levels"], batch["gauge"]), batch["next"]))
        share = step.number / step.of
        optimizer.param_groups[0]["lr"] = settings.rate.first * (1 - share) + settings.rate.last * share
        optimizer.step()
        if step.number % settings.log_every == 0:
            step.log(loss=step.loss)
        if (step.number + 1) % settings.evaluate_every == 0:
            measured = metrics(model, test_set, run)
            step.log(**measured)
            best.update(measured["mean_error"])
            if patience.update(measured["mean_error"]):
                run.stop(f"no smaller error in {settings.patience} evaluations")

    best.load()
    run.finish(**metrics(model, test_set, run))


if __name__ == "__main__":
    sb.main(train)
