"""Train the small networks of the golden set with core only, several on one set of ranks.

    golden_networks.py OUT CASE...     CASE: network,ranks,shard,workers,precision,compile,fault

Rank 0 writes a JSON object to OUT: the digest of each case, or its error. It covers each loss, each gradient norm, and
the final weights and buffers.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from samebits.core import exact, flags, options, plan, sampling, seeds, shards, tree
from samebits.core.errors import UserError
from samebits.core.loop import Loop
from samebits.core.order import Permutation
from samebits.core.ranks import World
from samebits.core.state import State
from samebits.core.step import Step

STEPS, SAMPLES, GLOBAL_BATCH, MICRO_BATCHES, WIDTH = 3, 30, 16, 8, 32  # the third step is of two epochs


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with seeded noise: x of (WIDTH,) float32, y an int below 5."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.linspace(-1, 1, WIDTH) * (index % 7) + 0.1 * torch.randn(WIDTH), index % 5


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :4].abs() * 10).long() % 5
        return self.head(self.hidden(self.embedding(tokens).mean(1) + x).tanh())


class Unused(nn.Module):
    """Parameters that some micro-batches use, that none uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output = self.always(self.frozen(x))
        return output + self.sometimes(x) if x[0, 0] > -3 else output


class Adversarial(nn.Module):
    """A generator and a discriminator, whose losses are computed by the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, trained: nn.Module) -> Tensor:
        fake = self.generator(torch.randn(16, 4)[: len(x)])  # fewer numbers are drawn by other code
        if trained is self.generator:
            return F.softplus(-self.discriminator(fake)).mean()
        # One call: parallel.shard=full gathers each unit once per micro-batch.
        real, generated = self.discriminator(torch.cat([x, fake.detach()])).chunk(2)
        return (F.softplus(-real) + F.softplus(generated)).mean()


class BatchNorm(nn.Module):
    """Two convolutions with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        )
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.unflatten(1, (1, 8, 4)).repeat(1, 1, 1, 2)).flatten(1)[:, :32])


def dropout() -> nn.Module:
    """Return layers with dropout, whose widths no world size divides."""
    return nn.Sequential(
        *(nn.Linear(WIDTH, 67), nn.LayerNorm(67), nn.Dropout(0.2), nn.GELU(), nn.Linear(67, 5)),
    )


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer whose square roots are rounded alike on every CPU."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def classify(model: nn.Module, optimizers: Any, steps: Iterator[Step]) -> Iterator[Tensor]:
    """Train with one sum of gradients per step, clipped; yield losses and norms."""
    for step in steps:
        for x, y in step:
            step.backward(F.cross_entropy(model(x).float(), y))
        yield step.loss
        yield exact.clip_grad_norm_(model.parameters(), 0.5)
        optimizers.step()


def compete(model: Any, optimizers: Any, steps: Iterator[Step]) -> Iterator[Tensor]:
    """Train with two sums of gradients per step: the discriminator's, then the generator's."""
    for step in steps:
        for part, optimizer in zip((model.discriminator, model.generator), optimizers, strict=True):
            for x, _ in step:
                step.backward(model(x, part))
            yield step.loss
            optimizer.step()


Build = Callable[[], nn.Module]
Train = Callable[[Any, Any, Iterator[Step]], Iterator[Tensor]]
NETWORKS: dict[str, tuple[Build, Train]] = {
    "batchnorm": (BatchNorm, classify),
    "dropout": (dropout, classify),
    "gan": (Adversarial, compete),
    "ties": (Tied, classify),
    "unused": (Unused, classify),
}

# A planted change of the arithmetic: an object, an attribute of it, and the value that replaces it.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "tree": (tree, "are_siblings", lambda left, right, leaves: left[1] == right[0]),  # from left to right
    "seeds": (seeds, "derive", lambda *given, derive=seeds.derive: derive(*given) ^ 1),
    "order": (plan, "Permutation", lambda n, key: Permutation(n, key ^ 1)),
    "norm": (exact, "clip_grad_norm_", lambda parameters, limit: torch.nn.utils.clip_grad_norm_(parameters, limit)),
}


def train(network: str, world: World, settings: options.Options) -> str:
    """Train a network and return the digest of what it computed: 16 hex digits.

    Raises:
        UserError: the combination is not supported.
    """
    build, loop_of = NETWORKS[network]
    seeds.seed_everything(seeds.derive(settings.seed, "init"))
    model = build()
    parts = [model] if loop_of is classify else [model.discriminator, model.generator]
    optimizers = [adamw(filter(lambda parameter: parameter.requires_grad, part.parameters())) for part in parts]
    dataset = Noisy()
    planned, stop = plan.planned(dataset, settings, None, STEPS)
    optimizer = optimizers if len(parts) > 1 else optimizers[0]
    loop = Loop(settings, world, planned, stop, State.of(model, optimizer, {}))
    keys = sampling.MicroBatches(planned, loop.gradients.leaves[world.rank], 0, stop)
    loop.batches = sampling.batches(sampling.Loading(settings, world).loader(dataset, keys), world)
    hasher = hashlib.sha256()
    tensors = [*loop_of(model, optimizer, loop.steps(0))]
    for tensor in [*tensors, *shards.weights(model).values()]:
        hasher.update(shards.unsharded(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()[:16]


def main() -> None:
    """Train all cases in order; a rank that a case does not need continues with the next one."""
    out, *cases = sys.argv[1:]
    flags.set_environment(options.Determinism())
    flags.apply(options.Determinism())
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    groups = {1: None}
    if size > 1:
        dist.init_process_group("gloo")
        groups |= {ranks: dist.new_group(range(ranks)) for ranks in range(2, size + 1)}
    digests: dict[str, str] = {}
    for case in cases:
        network, ranks, shard, workers, precision, compiled, fault = case.split(",")
        if rank >= int(ranks):
            continue
        settings = options.Options(
            seed=0,
            parallel=options.Parallel(GLOBAL_BATCH, MICRO_BATCHES, shard=shard, timeout_seconds=60),
            compute=options.Compute(precision, compiled == "compile"),
            loader=options.Loader(int(workers)),
        )
        world = World(rank, int(ranks), torch.device("cpu"), groups[int(ranks)])
        with ExitStack() as patches:
            if fault:
                patches.enter_context(patch.object(*FAULTS[fault]))
            try:
                digests[case] = train(network, world, settings)
            except UserError as error:
                digests[case] = str(error)
    if rank == 0:
        Path(out).write_text(json.dumps(digests))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
