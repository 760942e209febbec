"""Train small networks on many world sizes, in groups of one set of ranks; in some cases one part of the sum is broken.

    worlds.py <package> OUT CASES      each: model,micro-batches,ranks,shard,replicas,ranks per host,fault

Rank 0 writes to OUT, for each case, the digest of gradients, norm and weights after a few steps, and the collectives
of these with the kinds of numbers that they add. A case that is refused has its refusal in place of the digest.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, SAMPLES, WIDTH = 2, 2, 32
ADDING = "all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter"
MOVING = (
    *("all_to_all_single", "all_to_all", "all_gather_into_tensor", "all_gather_single", "all_gather"),
    *("isend", "irecv"),
)


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


def shipped(name: str, *sizes: float) -> nn.Module:
    """A network of the project."""
    model: nn.Module = getattr(import_module(f"{PACKAGE}.model"), name)(*sizes)
    return model


VECTORS, IMAGES = (SAMPLES, WIDTH), (SAMPLES, 1, 8, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # and the shape of a micro-batch
    "plain": (plain, VECTORS),
    "normed": (normed, VECTORS),
    "conditional": (Conditional, VECTORS),
    "bfloat16": (partial(plain, torch.bfloat16), VECTORS),
    "float64": (partial(plain, torch.float64), VECTORS),
    "convnet": (partial(shipped, "ConvNet", 8, 2, 0.2), IMAGES),
    "transformer": (partial(shipped, "Transformer", 32, 2, 0.2), IMAGES),
}


class Case:
    """One training: what it is, and this rank's place in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.model, total, ranks, self.shard, replicas, local, self.fault = text.split(",")
        self.total, self.ranks, self.replicas, self.local = int(total), int(ranks), int(replicas), int(local)

    def train(self, world: Any) -> str:
        """The digest of all that a training leaves."""
        keys = {"global_batch": SAMPLES * self.total, "micro_batches": self.total, "timeout_seconds": 60}
        keys |= {"shard": self.shard, "replicas": self.replicas}
        torch.manual_seed(0)
        build, shape = MODELS[self.model]
        model = build()
        units = [module for module in model if isinstance(module, nn.Linear)] if type(model) is nn.Sequential else ()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, fused=True)
        state = repro("core.state").State.of(model, optimizer, {})
        settings = repro("config.settings").Parallel(**keys)
        way = repro("core.summing").gradients_of(state, settings, world, units)
        digest, shards = hashlib.sha256(), repro("core.shards")
        for step in range(STEPS):
            for number in way.micro_batches(0 if step else None):
                seed = 1000 * step + number
                x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(trained[0].dtype)
                way.add(loss_of(model, x, seed))
            loss = way.reduce()
            gradients = [*shards.gradients_held(dict(model.named_parameters())).values()]
            norm = repro("core.exact").clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for held in (loss, norm, *gradients, *shards.weights(model).values()):
                digest.update(shards.unsharded(held).detach().contiguous().view(-1).view(torch.uint8).numpy())
        way.end()
        return digest.hexdigest()[:16]


def loss_of(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    """The mean loss of a micro-batch."""
    torch.manual_seed(seed)
    return model(x).float().square().mean()


def repro(name: str) -> Any:
    """A module of the package under test."""
    return import_module(f"samebits.{name}")


@contextmanager
def listed(found: set[str]) -> Iterator[None]:
    """Note the names of the collectives, and what those that add are given."""

    def note(name: str, call: Callable[..., Any], *given: Any, **more: Any) -> Any:
        adds = name in ADDING and not any(each is dist.ReduceOp.MAX for each in given)
        found.add(f"{name} {given[0].dtype}" if adds else name)
        return call(*given, **more)

    with ExitStack() as patches:
        for name in (*ADDING, *MOVING):
            patches.enter_context(patch.object(dist, name, partial(note, name, getattr(dist, name))))
        yield


# ---- faults: each a module or class, the name there, and what stands in its place

Fault = tuple[Any, str, Any]
Node = tuple[int, int]


def nothing() -> list[Fault]:
    """No fault."""
    return []


def left() -> list[Fault]:
    """The remainder is folded from the left: with 7 leaves ((0 to 3) + (4 + 5)) + 6."""
    tree = repro("core.tree")
    pairs = tree.are_siblings

    def siblings(left: Node, right: Node, leaves: int) -> bool:
        rest, size = leaves - right[0], right[1] - right[0]
        folds = (
            left[0] == 0 and left[1] == right[0] and rest < left[1] & -left[1] and size == 1 << rest.bit_length() - 1
        )
        return folds or (size == left[1] - left[0] and bool(pairs(left, right, leaves)))

    return [(tree, "are_siblings", siblings)]


def incomplete() -> list[Fault]:
    """A rank adds its neighbours, whether their node is complete within its block or not."""
    return [(repro("core.tree"), "are_siblings", lambda left, right, leaves: left[1] == right[0])]


def kept() -> list[Fault]:
    """Leaf 2 is accumulated into leaf 1, which is not its sibling."""
    accumulate = repro("core.accumulate")
    push, moved = accumulate.Bucket.push, {(1, 3): (1, 2), (3, 4): (2, 4)}

    def push_elsewhere(self: Any, node: Node, leaves: int) -> None:
        push(self, moved.get(node, node), leaves)

    return [
        (accumulate, "are_siblings", lambda left, right, leaves: left == (1, 2)),
        (accumulate.Bucket, "push", push_elsewhere),
    ]


def backend() -> list[Fault]:
    """The backend's all-reduce in place of one all-to-all."""
    transport = repro("core.transport").Transport
    finish = transport.finish

    def reduced(self: Any, sent: Any) -> Any:
        ((node, _),) = finish(self, sent)
        ((world, _),) = self._levels
        whole = sent.sent.sum(1)
        dist.all_reduce(whole, group=world.group)
        return [(node, whole[world.rank])]

    return [(transport, "finish", reduced)]


def swapped() -> list[Fault]:
    """Two nodes that arrive change places, of which neither is the other's sibling: the second and the third."""

    def arrange(arrived: Any, key: Any) -> Any:
        nodes, (first, second, third, *others) = zip(*sorted(arrived, key=key), strict=True)
        return zip(nodes, (first, third, second, *others), strict=True)

    return [(repro("core.transport"), "sorted", arrange)]


def twice() -> list[Fault]:
    """A hook fires twice for one gradient."""
    accumulation = repro("core.accumulate").Accumulation
    take = accumulation._take

    def take_twice(self: Any, *given: Any) -> None:
        take(self, *given)
        take(self, *given)

    return [(accumulation, "_take", take_twice)]


FAULTS = {fault.__name__: fault for fault in (nothing, left, incomplete, kept, backend, swapped, twice)}


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function that makes a group of ranks, or gives the one that is there."""
    made: dict[tuple[int, ...], Any] = {}

    def group_of(self: Any, ranks: Sequence[int], timeout: int) -> Any:
        key = tuple(ranks)
        made[key] = made.get(key) or make(self, ranks, timeout)
        return made[key]

    return group_of


def main() -> None:
    """All cases, in the order given; the ranks that a case does not need go on to the next one."""
    dist.init_process_group("gloo")
    # each group is made once: its threads stay; and torch names it by how many a process has, which differs here
    dist.distributed_c10d._hash_ranks_to_str = str
    world_type = repro("core.ranks").World
    world_type._group_of = once(world_type._group_of)
    rank, device = dist.get_rank(), torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    groups = {size: dist.new_group(range(size)) for size in range(2, dist.get_world_size() + 1)}
    digests: dict[str, str] = {}
    collectives: dict[str, list[str]] = {}
    for case in map(Case, CASES):
        if rank >= case.ranks:
            continue
        hosts = [
            (repro(f"core.{name}"), "local_size", lambda world, local=case.local: local)
            for name in ("accumulate", "fsdp")
        ]
        world, found = repro("core.ranks").World(rank, case.ranks, device, groups.get(case.ranks)), set[str]()
        with ExitStack() as patches:
            for place, name, value in [*hosts, *FAULTS[case.fault]()]:
                patches.enter_context(patch.object(place, name, value, create=True))
            patches.enter_context(listed(found))
            try:
                digests[case.text] = case.train(world)
            except repro("core.errors").UserError as refused:
                digests[case.text] = str(refused)
        collectives[case.text] = sorted(found)
    if rank == 0:
        Path(OUT).write_text(json.dumps({"digests": digests, "collectives": collectives}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    PACKAGE, OUT, *CASES = sys.argv[1:]
    main()
