"""Yours: the training loop, read from top to bottom.

    python -m <package>.train                                            one process
    torchrun --standalone --nproc-per-node 4 -m <package>.train          four, with the same bits
    ... --set train.epochs=3 --set model.name=transformer --out DIR      other values, another run directory

The run directory ends with model.safetensors, metrics.json, environment.json and address.json.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .config import Config
from .repro import launch

if __name__ == "__main__":  # before torch is imported, because it reads its environment then
    CONFIG, OUT = launch.begin(Config)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import data
from .evaluate import accuracy, evaluate
from .model import build
from .repro import sampling
from .repro.determinism import seed_everything
from .repro.errors import NonFinite
from .repro.parallel import gradients_of, nonfinite
from .repro.run import Run
from .repro.seeds import derive


def train(config: Config, out: Path) -> None:
    """One run, from config to summary."""
    with Run(config, out) as run:
        settings, world, device = config.train, run.world, run.world.device
        train_set, test_set = data.load(config.data)

        seed_everything(derive(config.seed, "init"))
        model = build(config.model).to(device)
        gradients = gradients_of(model, config.parallel, world)
        forward = torch.compile(gradients.module) if config.compute.compile else gradients.module
        # the unfused AdamW takes its square roots from a library whose last bit depends on the CPU
        optimizer = torch.optim.AdamW(parameter_groups(model, settings.weight_decay), fused=True)

        start = run.restore(model, optimizer)
        plan = sampling.Plan(len(train_set), config.parallel.global_batch, config.parallel.shards, config.seed)
        mine, steps = plan.mine(world), plan.steps(settings.epochs)
        batches = iter(sampling.loader(train_set, plan, config, world, start, steps))

        for step in run.steps(start, steps):
            for shard in gradients.shards(mine):
                batch = [tensor.to(device, non_blocking=True) for tensor in next(batches)]
                run.trace.batch(shard, batch)
                seed = derive(config.seed, "shard", step, shard)
                compute = partial(shard_loss, forward, batch, seed, config.compute.precision == "bfloat16")
                gradients.add(compute, twice=run.rechecks(step, shard))
            loss = gradients.reduce()  # now every rank holds the same gradients, to the last bit
            run.trace.gradients(loss)

            if names := nonfinite(model):
                if settings.nonfinite == "stop":
                    raise NonFinite(f"step {step}: the gradient is not finite in: {', '.join(names)}")
                gradients.discard()
                run.log(step, skipped=1)
                continue
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            rate = learning_rate(step, steps, settings.learning_rate, settings.warmup, settings.decay)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            run.log(step, loss=loss, gradient_norm=norm, learning_rate=rate)

            if plan.ends_epoch(step, settings.evaluate_every) and step + 1 < steps:
                counts, test_loss = evaluate(model, test_set, settings.evaluate_batch, world)
                run.log(step, epoch=plan.epoch(step + 1), accuracy=accuracy(counts), test_loss=test_loss)

        counts, test_loss = evaluate(model, test_set, settings.evaluate_batch, world)
        run.log(steps - 1, epoch=plan.epoch(steps), accuracy=accuracy(counts), test_loss=test_loss)
        run.finish(model, accuracy=accuracy(counts), test_loss=test_loss, steps=steps)


def shard_loss(model: Callable[[Tensor], Tensor], batch: list[Tensor], seed: int, bfloat16: bool) -> Tensor:
    """The mean loss of one shard, a scalar; `seed` decides its dropout."""
    images, labels = batch
    seed_everything(seed)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bfloat16):
        return F.cross_entropy(model(images), labels)


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
    launch.call(train, CONFIG, OUT)
