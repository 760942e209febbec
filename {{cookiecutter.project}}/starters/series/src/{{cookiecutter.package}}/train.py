"""The training loop, with several losses."""

import torch
from torch import Tensor
from torch.nn import functional as F

import samebits as sb

from . import data
from .config import Config
from .evaluate import metrics
from .model import Output, build

WEIGHTS = {"classify": 1.0, "foretell": 0.5, "steady": 0.01}  # of the losses


def train(run: sb.Run[Config]) -> None:
    """One run, from config to receipt."""
    settings = run.config.train
    train_set, test_set = data.load(run.config)
    model = build(run.config).to(run.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # the unfused AdamW takes its square roots from a library whose last bit depends on the CPU
    optimizer = torch.optim.AdamW(trained, weight_decay=settings.weight_decay, fused=True)

    for step in run.steps(model, optimizer, train_set, epochs=settings.epochs):
        for batch in step:
            parts = losses(model(batch["seen"]), batch)
            step.backward(torch.stack([weight * parts[name] for name, weight in WEIGHTS.items()]).sum())
        norm = sb.clip_grad_norm_(trained, settings.clip_norm)
        rate = learning_rate(step.number, step.of, settings.learning_rate, settings.rise)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        step.log(loss=step.loss, gradient_norm=norm, learning_rate=rate)

        if step.ends_epoch(settings.evaluate_every) and not step.is_last:
            step.log(epoch=step.epochs, **metrics(model, test_set, run))

    run.finish(**metrics(model, test_set, run))


def losses(output: Output, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean losses of a batch: of the class, of the next step, and of features that jump between steps."""
    return {
        "classify": F.cross_entropy(output.logits, batch["label"]),
        "foretell": F.smooth_l1_loss(output.next[:, :-1], batch["whole"][:, 1:], beta=0.1),
        "steady": output.features.diff(dim=1).square().mean(),
    }


def learning_rate(step: int, steps: int, peak: float, rise: float) -> float:
    """One cycle: up to the peak in a share of the steps, then down to 0, by + - x and / alone."""
    turn = rise * steps
    return peak * min((step + 1) / turn, (steps - step) / (steps - turn), 1.0)


if __name__ == "__main__":
    sb.main(train)
