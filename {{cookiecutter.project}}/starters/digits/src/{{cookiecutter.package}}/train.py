"""Yours: the training loop, read from top to bottom. `samebits train` runs it, on any number of ranks."""

from typing import Any

import torch
from torch import nn
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
    # the unfused AdamW takes its square roots from a library whose last bit depends on the CPU
    optimizer = torch.optim.AdamW(parameter_groups(model, settings.weight_decay), fused=True)

    for step in run.steps(model, optimizer, train_set, epochs=settings.epochs):
        for images, labels in step:  # this rank's micro-batches; dropout and other draws are seeded for each
            step.backward(F.cross_entropy(model(images), labels))
        # every rank now holds the same gradients, to the last bit
        norm = sb.clip_grad_norm_(model.parameters(), settings.clip_norm)
        rate = learning_rate(step.number, step.of, settings.learning_rate, settings.warmup, settings.decay)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        step.log(loss=step.loss, gradient_norm=norm, learning_rate=rate)

        if step.ends_epoch(settings.evaluate_every) and not step.is_last:
            step.log(epoch=step.epochs, **metrics(model, test_set, run)[0])

    run.finish(**metrics(model, test_set, run)[0])


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight matrices decay; biases, norms and other vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def learning_rate(step: int, steps: int, peak: float, warmup: float, decay: float) -> float:
    """Warm-up, plateau, linear decay; `warmup` and `decay` are shares of all steps.

    Only + - x and / are used, which every CPU rounds alike; a cosine would not be.
    """
    rise = (step + 1) / max(1, int(warmup * steps))
    fall = (steps - step) / max(1, int(decay * steps))
    return peak * min(1.0, rise, fall)


if __name__ == "__main__":
    sb.main(train)
