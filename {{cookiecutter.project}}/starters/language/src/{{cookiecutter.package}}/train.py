"""The training loop: so many steps of AdamW on windows of tokens."""

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
    groups = parameter_groups(model, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    for step in run.steps(model, optimizer, train_set, steps=settings.steps):
        for tokens in step:  # each is foretold from those before it
            step.backward(F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
        norm = sb.clip_grad_norm_(model.parameters(), settings.clip_norm)
        rate = learning_rate(step.number, step.of, settings.learning_rate, settings.warmup, settings.decay)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        step.log(loss=step.loss, gradient_norm=norm, learning_rate=rate)

        if (step.number + 1) % settings.evaluate_every == 0 and not step.is_last:
            step.log(**metrics(model, test_set, run))

    run.finish(**metrics(model, test_set, run))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms do not. A tied weight is one parameter, and stands in one group."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def learning_rate(step: int, steps: int, peak: float, warmup: float, decay: float) -> float:
    """Warm-up, plateau, linear decay, by + - x and / alone; `warmup` and `decay` are shares of all steps."""
    rise = (step + 1) / max(1, int(warmup * steps))
    fall = (steps - step) / max(1, int(decay * steps))
    return peak * min(1.0, rise, fall)


if __name__ == "__main__":
    sb.main(train)
