"""Train small networks on many world sizes, in groups of one set of ranks; with a fault, one part of the sum is broken.

    worlds.py <package> FAULT OUT CASE …      CASE: model,micro-batches,ranks,shard,replicas,ranks per host

Rank 0 writes to OUT, for each case, the digest of gradients, buffers and weights after a few steps, and the names of
the collectives with the kinds of numbers that they add. A case that is refused has its refusal in place of the digest.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, SAMPLES, WIDTH = 2, 2, 32
ADDING = "all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single"
MOVING = "all_to_all_single", "all_gather_into_tensor", "all_gather_single"


class Conditional(nn.Module):
    """A parameter that no micro-batch uses, one that some use, a tied one, a frozen one; of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale, self.nothing = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.frozen(self.first(x))) * self.scale + self.nothing.sum()
        return self.second(hidden) if x[0, 0] > 0 else hidden


def normed() -> nn.Module:
    """Running statistics, and a counter."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def plain(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Layers with dropout; widths that no world size divides."""
    layers = [
        nn.Linear(WIDTH, 67),
        nn.LayerNorm(67),
        nn.Dropout(0.2),
        nn.Linear(67, 96),
        nn.GELU(),
        nn.Linear(96, WIDTH),
    ]
    return nn.Sequential(*layers).to(dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "normed": normed,
    "conditional": Conditional,
    "bfloat16": partial(plain, torch.bfloat16),
    "float64": partial(plain, torch.float64),
}


class Case:
    """One training: what it is, and this rank's place in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.model, total, ranks, self.shard, replicas, local = text.split(",")
        self.total, self.ranks, self.replicas, self.local = int(total), int(ranks), int(replicas), int(local)

    def train(self, world: Any) -> str:
        """The digest of all that a training leaves."""
        keys = {"global_batch": SAMPLES * self.total, "micro_batches": self.total, "timeout_seconds": 60}
        keys |= {"reduce": "tree", "shard": self.shard, "replicas": self.replicas}
        torch.manual_seed(0)
        model = MODELS[self.model]()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, fused=True)
        optimizers = repro("training.optimizers").Optimizers(optimizer, model)
        units = [module for module in model.children() if isinstance(module, nn.Linear)] if self.shard == "full" else []
        if self.model == "conditional":
            units = []  # the tied weights lie in one unit
        way = repro("training.summing").gradients_of(
            model, repro("asked.settings").Parallel(**keys), world, optimizers, units
        )
        digest = hashlib.sha256()
        for step in range(STEPS):
            for number in way.micro_batches(0 if step else None):
                generator = torch.Generator().manual_seed(1000 * step + number)
                x = torch.randn(SAMPLES, WIDTH, generator=generator).to(trained[0].dtype)
                way.add(partial(self.loss, way.module, x, 1000 * step + number))
            loss = way.reduce()
            names = dict(model.named_parameters())
            gradients = [repro("training.shards").gradient_of(p) for p in names.values() if p.requires_grad]
            norm = repro("training.exact").clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            weights = repro("training.shards").weights(model)
            for held in (loss, norm, *gradients, *weights.values()):
                digest.update(
                    repro("training.shards").whole(held).detach().contiguous().view(-1).view(torch.uint8).numpy()
                )
        way.end()
        return digest.hexdigest()[:16]

    def loss(self, model: nn.Module, x: Tensor, seed: int) -> Tensor:
        """The mean loss of a micro-batch."""
        torch.manual_seed(seed)
        return model(x).float().square().mean()


def repro(name: str) -> Any:
    """A module of the package under test."""
    return import_module(f"{PACKAGE}.repro.{name}")


@contextmanager
def listed(found: set[str]) -> Iterator[None]:
    """Note the names of the collectives with the kinds of numbers that they add."""
    held = {
        name: getattr(dist, name) for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce")
    }
    others = {
        name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_into_tensor", "all_gather_single")
    }

    def note(name: str, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        largest = any(each is dist.ReduceOp.MAX for each in given)
        found.add(f"{name} {given[0].dtype}" if name in held and not largest else name)
        return call(*given, **more)

    for name, call in (held | others).items():
        setattr(dist, name, partial(note, name, call))
    yield
    for name, call in (held | others).items():
        setattr(dist, name, call)


def fault_kept() -> None:
    """An odd leaf is accumulated into the wrong sibling: autograd adds wherever two leaves follow one another."""
    module = repro("training.accumulate")
    module.are_siblings = lambda left, right, leaves: left[0] % 2 == 1 or right[1] == leaves


def fault_backend() -> None:
    """The backend's sum in place of one all-to-all."""
    transport = repro("training.transport").Transport
    finish = transport.finish

    def summed(self: Any, sent: Any) -> Any:
        ((node, root),) = finish(self, sent)
        if node[1] - node[0] == self._leaves and self.parts > 1:
            world = self._levels[0][0]
            sent.sent[:] = sent.sent.sum(1, keepdim=True)
            whole = sent.sent[:, 0].clone()
            dist.all_reduce(whole, group=world.group)
            return [(node, whole[world.rank])]
        return [(node, root)]

    transport.finish = summed


def fault_left() -> None:
    """What is left over at the end is added from the left."""
    tree = repro("training.tree")

    def siblings(left: Any, right: Any, leaves: int) -> bool:
        size = left[1] - left[0]
        return left[1] == right[0] and (
            (left[0] % (2 * size) == 0 and right[1] - right[0] == size)
            or (left[0] == 0 and right[1] - right[0] < size and right[1] // (right[1] & -right[1]) % 2 == 1)
        )

    tree.are_siblings = siblings


def fault_incomplete() -> None:
    """A rank adds all of its leaves, whether their node is complete within its block or not."""
    tree = repro("training.tree")
    tree.are_siblings = lambda left, right, leaves: left[1] == right[0]


def main() -> None:
    """All cases, in the order given; the ranks that a case does not need go on to the next one."""
    dist.init_process_group("gloo")
    # torch counts all groups of a process; here ranks are in different numbers of them
    made: Counter[str] = Counter()
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: f"{ranks} {made.update([str(ranks)])} {made[str(ranks)]}"
    rank, device = dist.get_rank(), torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    world_of = repro("training.world").World
    groups = {size: dist.new_group(range(size)) for size in range(2, dist.get_world_size() + 1)}
    if FAULT != "nothing":
        globals()[f"fault_{FAULT}"]()
    found: dict[str, Any] = {}
    collectives: set[str] = set()
    with listed(collectives):
        for case in map(Case, CASES):
            if rank < case.ranks:
                for module in ("training.accumulate", "training.sharded"):
                    repro(module).local_size = lambda world, local=case.local: local
                world = world_of(rank, case.ranks, device, groups.get(case.ranks))
                found[case.text] = case.train(world)
    if rank == 0:
        Path(OUT).write_text(json.dumps({"digests": found, "collectives": sorted(collectives)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    PACKAGE, FAULT, OUT, *CASES = sys.argv[1:]
    main()
