"""Your loop. `samebits train` runs it, on any number of ranks."""

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
    # any optimizer of torch; AdamW needs `fused=True` to have the same bits on each CPU
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, fused=True)

    for step in run.steps(model, optimizer, train_set, epochs=settings.epochs):
        for inputs, targets in step:  # a step is some micro-batches, each a batch of items of the dataset
            step.backward(F.mse_loss(model(inputs), targets))  # your loss, in place of loss.backward()
        # clip gradients and set the learning rate here: sb.clip_grad_norm_, group["lr"]
        optimizer.step()
        step.log(loss=step.loss)  # any numbers by name, for MLflow and the progress line

    run.finish(**metrics(model, test_set, run))  # writes the weights, the metrics and the receipt


if __name__ == "__main__":
    sb.main(train)
