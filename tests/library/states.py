"""A small training, and the snapshots of it that the tests on checkpoints save."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.checkpoint.checkpoint import Origin, found
from samebits.config.settings import Parallel
from samebits.core.finite import nonfinite
from samebits.core.optimizers import Optimizers
from samebits.core.shards import gradients_held, unsharded
from samebits.core.state import Snapshot, State, copy

ORIGIN = Origin("a" * 64, "e" * 64)
FILES = {"model.safetensors", "optimizer.safetensors", "others.safetensors", "state.json", "manifest.json"}

Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, betas=(0.8, 0.99)),
}


def parallel_of(micro_batches: int, **keys: Any) -> Parallel:
    """The usual settings, with batches of so many micro-batches."""
    usual = {"shard": "none", "replicas": 1, "timeout_seconds": 60}
    return Parallel(**{"global_batch": 8 * micro_batches, "micro_batches": micro_batches, **usual, **keys})


def state_of(model: nn.Module) -> State:
    """What a loop holds of a model and of an optimizer for it."""
    return State.of(model, torch.optim.SGD(model.parameters()), {})


class Training:
    """A small model with buffers, trained on numbers of its own."""

    def __init__(self, optimizer: Optimizer = OPTIMIZERS["fused AdamW"]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        matrices, vectors = ([p for p in self.model.parameters() if (p.ndim > 1) == many] for many in (True, False))
        self.optimizer = optimizer([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}])
        self.optimizers = Optimizers(self.optimizer, self.model)
        self.done = 0

    @property
    def state(self) -> State:
        return State(self.model, self.optimizers)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            torch.manual_seed(self.done)
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 4)).square().mean().backward()
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 / (self.done + 3)
            self.optimizer.step()
            self.done += 1

    def take(self) -> Snapshot:
        return self.state.look(self.done).changed(copy)


def nonfinite_of(model: nn.Module, sums: Any) -> list[str]:
    """The names that a step with these sums would give."""
    return nonfinite(sums.buffers, gradients_held(dict(model.named_parameters())))


def snapshot(steps: int) -> Snapshot:
    training = Training()
    training.step(steps)
    return training.take()


def assert_equal(one: Snapshot, other: Snapshot) -> None:
    assert one.step == other.step
    for part in ("model", "optimizer", "others"):
        these, those = getattr(one, part), getattr(other, part)
        assert sorted(these) == sorted(those)
        for name in these:
            this, that = unsharded(these[name]), unsharded(those[name])
            assert this.dtype == that.dtype and torch.equal(this, that), name
    assert json.dumps(one.values, sort_keys=True) == json.dumps(other.values, sort_keys=True)


def content(out: Path) -> str:
    """The digest of the state in a run's newest checkpoint."""
    digest: str = json.loads((found(out / "checkpoints")[-1] / "state.json").read_text())["content"]
    return digest


def silent(message: str) -> None:
    raise AssertionError(f"nothing was to be told, but: {message}")
