"""Eleven training loops as public repositories have them, written for this library, each of a few steps."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from everyday import (
    CLASSES,
    EMA,
    GPT,
    SIDE,
    STEPS,
    CosineScheduler,
    Curriculum,
    Forecaster,
    Images,
    ModelEma,
    MultiTask,
    Series,
    Text,
    accuracy,
    cross_entropy,
    network,
    padded,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

import samebits as sb

Loop = Callable[[Any], None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


# ---- as timm trains


@loop
def timm_like(run: Any) -> None:
    model, dataset = network(), Images()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    ema, schedule = ModelEma(model, 0.9), CosineScheduler(optimizer, STEPS, 2)

    for step in run.steps(model, optimizer, dataset, steps=STEPS, state={"ema": ema, "schedule": schedule}):
        optimizer.zero_grad()
        for images, labels in step:
            share, order = float(np.random.beta(0.8, 0.8)), torch.randperm(len(images))
            targets = F.one_hot(labels, CLASSES).float()
            outputs = model(share * images + (1 - share) * images[order])
            step.backward(criterion(outputs, share * targets + (1 - share) * targets[order]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        ema.update(model)
        schedule.step_update(step.number + 1)
        step.log(loss=step.loss, lr=optimizer.param_groups[0]["lr"])
    run.finish(accuracy=accuracy(model, dataset), accuracy_ema=accuracy(ema.module, dataset))


# ---- as nanoGPT trains


@loop
def nanogpt_like(run: Any) -> None:
    model, dataset = GPT(), Text()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))  # fused on CUDA alone, as there

    def get_lr(number: int) -> float:
        if number < 2:
            return 1e-2 * (number + 1) / 2
        return 1e-3 + 0.5 * (1 + math.cos(math.pi * (number - 2) / (STEPS - 2))) * (1e-2 - 1e-3)

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = torch.zeros(3)
        for k in range(3):
            chosen = torch.randint(len(dataset), (8,))
            x, y = (torch.stack(part) for part in zip(*(dataset[int(i)] for i in chosen), strict=True))
            losses[k] = model(x, y).item()
        model.train()
        return losses.mean().item()

    for step in run.steps(model, optimizer, dataset, steps=STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step.number)
        if step.number % 2 == 0:
            step.log(val_loss=estimate_loss())
        for x, y in step:
            step.backward(model(x, y))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step.log(loss=step.loss)
    run.finish(val_loss=estimate_loss())


# ---- averages of the weights


@loop
def ema(run: Any) -> None:
    model, dataset = network(), Images()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    ema = EMA(model, 0.9)
    for step in run.steps(model, optimizer, dataset, steps=STEPS, state={"ema": ema, "scheduler": scheduler}):
        for batch in step:
            step.backward(cross_entropy(model, batch))
        optimizer.step()
        scheduler.step()
        ema.update()
        ema.apply_shadow()
        step.log(loss=step.loss, accuracy=accuracy(model, dataset))
        ema.restore()
    ema.apply_shadow()
    run.finish(accuracy=accuracy(model, dataset))


@loop
def swa(run: Any) -> None:
    model, dataset = network(), Images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa_model, scheduler = AveragedModel(model), lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    swa_scheduler = SWALR(optimizer, anneal_strategy="linear", anneal_epochs=2, swa_lr=0.05)
    state = {"swa_model": swa_model, "scheduler": scheduler, "swa_scheduler": swa_scheduler}
    for step in run.steps(model, optimizer, dataset, steps=STEPS, state=state):
        optimizer.zero_grad()
        for batch in step:
            step.backward(cross_entropy(model, batch))
        step.log(loss=step.loss)
        optimizer.step()
        if step.number >= 1:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(DataLoader(dataset, batch_size=16, shuffle=True), swa_model)
    model.load_state_dict(swa_model.module.state_dict())
    run.finish(accuracy=accuracy(swa_model, dataset))


# ---- losses


@loop
def curriculum(run: Any) -> None:
    model, dataset, curriculum = network(), Images(), Curriculum()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    state = {"curriculum": curriculum, "scheduler": scheduler}
    for step in run.steps(model, optimizer, dataset, steps=STEPS, state=state):
        for images, labels in step:
            losses = F.cross_entropy(model(images), labels, reduction="none")
            difficulty = images.flatten(1).std(1)
            kept = difficulty <= torch.quantile(difficulty, curriculum.level)
            step.backward((losses * kept).sum() / kept.sum().clamp(min=1))
        optimizer.step()
        scheduler.step(step.loss)
        curriculum.update(step.loss.item())
        step.log(loss=step.loss, level=curriculum.level)
    run.finish(accuracy=accuracy(model, dataset))


@loop
def distillation(run: Any) -> None:
    teacher, student, dataset, temperature = network(16), network(4), Images(), 4.0
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, fused=True)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.1)

    for step in run.steps(student, optimizer, dataset, steps=STEPS, state={"scheduler": scheduler}):
        for images, labels in step:
            with torch.no_grad():
                soft = F.softmax(teacher(images) / temperature, dim=-1)
            outputs = student(images)
            loss = F.kl_div(F.log_softmax(outputs / temperature, dim=-1), soft, reduction="batchmean") * temperature**2
            step.backward(0.9 * loss + 0.1 * F.cross_entropy(outputs, labels))
        step.log(loss=step.loss)
        nn.utils.clip_grad_value_(student.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    run.finish(accuracy=accuracy(student, dataset))


@loop
def gradient_penalty(run: Any) -> None:
    critic = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9), fused=True)

    for step in run.steps(critic, optimizer, Images(), steps=STEPS):
        for real, _ in step:
            fake, share = torch.randn_like(real), torch.rand(len(real), 1, 1, 1)
            between = (share * real + (1 - share) * fake).requires_grad_(True)
            scores = critic(between)
            (gradients,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
            penalty = ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
            step.backward(critic(fake).mean() - critic(real).mean() + 10.0 * penalty)
        optimizer.step()
        step.log(loss=step.loss)
    run.finish(loss=step.loss)


@loop
def multi_task(run: Any) -> None:
    model = MultiTask()
    weights = [p for name, p in model.named_parameters() if name != "log_vars"]
    optimizer = torch.optim.NAdam([{"params": weights}, {"params": [model.log_vars], "lr": 1e-3}], lr=1e-2)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-3], total_steps=STEPS)

    for step in run.steps(model, optimizer, Images(), steps=STEPS, state={"scheduler": scheduler}):
        for images, labels in step:
            logits, brightness = model(images)
            bright = F.smooth_l1_loss(brightness, images.mean((1, 2, 3)))
            losses = torch.stack([F.cross_entropy(logits, labels), bright])
            step.backward((torch.exp(-model.log_vars) * losses + model.log_vars).sum())
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if not step.is_last:
            scheduler.step()
        step.log(loss=step.loss, log_var=model.log_vars[0])
    run.finish(loss=step.loss)


# ---- series of different lengths, early stopping, the best weights


@loop
def forecaster(run: Any) -> None:
    model, dataset = Forecaster(), Series()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    best, patience = sb.Best(model, higher=False), sb.Patience(2, higher=False, by=10.0)
    average = sb.Average(model, 0.5)
    state = {"best": best, "patience": patience, "average": average}

    def error() -> float:
        measured = sb.sums(measure, model, dataset, run, batch=16, collate=padded)
        return measured["errors"].item() / measured["count"].item()

    def measure(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        errors, count = model.errors(batch)
        return {"errors": errors, "count": count}

    order = sb.ByLength([4 + index % 5 for index in range(len(dataset))], 8)
    for step in run.steps(model, optimizer, dataset, steps=STEPS, state=state, order=order, collate=padded):
        for batch in step:
            errors, count = model.errors(batch)
            step.backward(errors / count)
        optimizer.step()
        average.update()
        with average.applied():
            step.log(loss=step.loss, error=error())
            best.update(error())
        if patience.update(error()):
            run.stop("the error has not fallen by 10 in 2 steps")
    best.load()
    run.finish(error=error())


# ---- parts of the model


@loop
def two_optimizers(run: Any) -> None:
    model, dataset = network(), Images()
    backbone = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    head = torch.optim.AdamW(model[1].parameters(), lr=1e-2, fused=True)
    schedulers = [
        lr_scheduler.ExponentialLR(backbone, 0.9),
        lr_scheduler.LambdaLR(head, lambda n: 1 / math.sqrt(n + 1)),
    ]
    state = {"backbone_scheduler": schedulers[0], "head_scheduler": schedulers[1]}
    for step in run.steps(model, [backbone, head], dataset, steps=STEPS, state=state):
        backbone.zero_grad()
        head.zero_grad()
        for batch in step:
            step.backward(cross_entropy(model, batch))
        backbone.step()
        head.step()
        for scheduler in schedulers:
            scheduler.step()
        step.log(loss=step.loss)
    run.finish(accuracy=accuracy(model, dataset))


@loop
def frozen_backbone(run: Any) -> None:
    model, dataset = network(), Images()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.Adagrad(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    for step in run.steps(model, optimizer, dataset, steps=STEPS, state={"scheduler": scheduler}):
        model.train()
        model[0].eval()  # its statistics stay as they are
        for batch in step:
            step.backward(cross_entropy(model, batch))
        optimizer.step()
        scheduler.step()
        step.log(loss=step.loss, accuracy=accuracy(model, dataset))
    run.finish(accuracy=accuracy(model, dataset))
