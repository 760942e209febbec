"""The training loop: it ends early, and the weights that were best on the validation set are its result."""

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
    validation_set = data.split(run.config, "validation")
    model = build(run.config).to(run.device)
    # the unfused AdamW takes its square roots from a library whose last bit depends on the CPU
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    best, patience = sb.Best(model, higher=False), sb.Patience(settings.patience, higher=False)
    state = {"best": best, "patience": patience}  # in each checkpoint

    for step in run.steps(model, optimizer, train_set, epochs=settings.epochs, state=state):
        for numbers, categories, targets in step:
            step.backward(F.mse_loss(model(numbers, categories), targets))
        optimizer.step()
        step.log(loss=step.loss)

        if step.ends_epoch(settings.evaluate_every) or step.is_last:
            error = metrics(model, validation_set, run)["rmse"]
            step.log(epoch=step.epochs, validation_rmse=error)
            best.update(error)
            if patience.update(error):
                run.stop(f"no smaller error on the validation set in {settings.patience} evaluations")

    best.load()  # what `finish` writes; the receipt says after which step they were the model's
    run.finish(**metrics(model, test_set, run))  # the test set has chosen nothing


if __name__ == "__main__":
    sb.main(train)
