"""The training loop: SGD with momentum, a cosine, and an average of the weights, which is the result."""

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
    average = sb.Average(model, settings.average)
    optimizer = torch.optim.SGD(
        model.parameters(), momentum=settings.momentum, weight_decay=settings.weight_decay, nesterov=True
    )

    # checkpoints hold the average, too
    for step in run.steps(model, optimizer, train_set, epochs=settings.epochs, state={"average": average}):
        for images, labels in step:
            step.backward(F.cross_entropy(model(images), labels, label_smoothing=settings.smoothing))
        rate = learning_rate(step.number, step.of, settings.learning_rate, settings.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        average.update()
        step.log(loss=step.loss, learning_rate=rate)

        if step.ends_epoch(settings.evaluate_every) and not step.is_last:
            with average.applied():
                step.log(epoch=step.epochs, **metrics(model, test_set, run))

    average.load()  # what `finish` writes
    run.finish(**metrics(model, test_set, run))


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Up to the peak in a share of the steps, then down to 0 along half a cosine."""
    rise = max(1, int(warmup * steps))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * (1 + sb.cosine(step - rise, steps - rise)) / 2


if __name__ == "__main__":
    sb.main(train)
