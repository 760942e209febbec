"""While they train: a rank that drifts and hardware that miscalculates are caught and named."""

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import FLIPPED_AFTER, Faulty, flip
from project.config import Config
from project.model import MODELS
from states import parallel_of, state_of
from support import PACKAGE
from torch import Tensor, nn
from torch.nn import functional as F

from samebits.core.accumulate import Accumulation
from samebits.core.errors import Disagreement
from samebits.core.loop import Loop
from samebits.core.optimizers import Optimizers
from samebits.core.ranks import World
from samebits.core.sampling import Plan
from samebits.core.seeds import seed_everything
from samebits.core.state import State
from samebits.core.step import Step

HOST = [socket.gethostname(), "cpu"]
AT = " ".join(HOST)
Run = Callable[..., Faulty]


@pytest.fixture
def run(tmp_path: Path, prepared: Path) -> Run:
    """A function that trains with one rank at fault, for about 20 steps."""

    def start(fault: str, at: int, ranks: int, *settings: str, **options: Any) -> Faulty:
        sets = "tracking.enabled=false", f"data.prepared={prepared}", *settings
        return Faulty(PACKAGE, tmp_path / f"{fault}{len(list(tmp_path.iterdir()))}", fault, at, ranks, *sets, **options)

    return start


# ---- weights that differ between ranks


@pytest.mark.parametrize(
    ("at", "ranks", "every", "caught"),
    [
        (1, 2, 1, FLIPPED_AFTER),
        pytest.param(0, 3, 5, 10, marks=pytest.mark.long),
        pytest.param(1, 2, 1000, 23, marks=pytest.mark.long),  # at the end in any case
    ],
)
def test_flipped_bit_in_one_ranks_weights_is_caught_and_blamed(run: Run, at: int, ranks: int, every: int, caught: int):
    """Of two ranks neither is blamed."""
    ran = run("weights", at, ranks, f"integrity.compare_every={every}")
    assert ran.codes == dict.fromkeys(range(ranks), "4"), ran.message
    assert f"step {caught}: the ranks' weights differ" in ran.message
    found = [line[2:] for line in ran.lines("head.weight")]
    others = {(0, 3): "1-2", (1, 2): "0"}[at, ranks]
    assert found == [[others, *HOST], [str(at), *HOST]]
    blame = "no rank is blamed" if ranks == 2 else f"against the majority: rank {at} on {AT}"
    assert blame in ran.message and ("against the majority" in ran.message) == (ranks == 3)
    assert ran.steps() == caught and not (ran.out / "model.safetensors").exists()


@pytest.mark.long
def test_table_is_shown_while_the_record_is_uploaded(run: Run):
    """Tracking ends seconds after the other ranks have, and torchrun waits for nobody. The server is down."""
    tracked = "tracking.enabled=true", "tracking.uri=http://127.0.0.1:1", "tracking.wait_seconds=5"
    ran = run("weights", 1, 2, "integrity.compare_every=1", *tracked, grace=0)
    assert ran.codes == {0: "4", 1: "4"}, ran.message
    assert len(ran.lines("head.weight")) == 2


@pytest.mark.long
def test_comparing_and_recomputing_change_no_bit(run: Run):
    def weights(ranks: int, every: int) -> str:
        integrity = f"integrity.compare_every={every}", f"integrity.recompute_every={every}"
        ran = run("nothing", 0, ranks, *integrity, "parallel.global_batch=256")
        assert ran.code == 0, ran.message
        return hashlib.sha256((ran.out / "model.safetensors").read_bytes()).hexdigest()

    assert weights(2, every=1) == weights(1, every=0)


@pytest.mark.long
def test_shards_of_replicas_are_compared(run: Run):
    ran = run("weights", 3, 4, "integrity.compare_every=1", "parallel.shard=full", "parallel.replicas=2")
    assert ran.codes == dict.fromkeys(range(4), "4"), ran.message
    assert f"step {FLIPPED_AFTER}: the replicas' weights differ" in ran.message
    assert "(met by rank 1, 3 of 4)" in ran.message
    assert len(ran.lines("head.weight")) == 2, ran.message


# ---- gradients computed twice


@pytest.mark.parametrize(
    ("fault", "shard", "micro_batch", "first"),
    [
        ("gradient", "none", 4, "head.weight: "),
        pytest.param("output_gradient", "full", 5, "", marks=pytest.mark.long),
    ],
)
def test_wrong_gradient_of_a_rank_is_caught_and_named(run: Run, fault: str, shard: str, micro_batch: int, first: str):
    ran = run(fault, 1, 2, "integrity.recompute_every=1", f"parallel.shard={shard}")
    assert ran.codes[1] == "4", ran.message
    said = f"rank 1: micro-batch {micro_batch}: computed twice on {AT}, the gradient differs in {first}"
    assert said in ran.message and "head.weight" in ran.message
    assert ran.steps() == 4 and not (ran.out / "model.safetensors").exists()


MICRO_BATCHES = 4
ALONE = World(0, 1, torch.device("cpu"))


class Rig:
    """Some steps of a model on one rank; its micro-batches draw dropout from their seed."""

    def __init__(self, name: str = "convnet") -> None:
        seed_everything(0)
        self.model = MODELS[name](16, 2, 0.5)
        settings = parallel_of(MICRO_BATCHES)
        self.gradients = Accumulation(state_of(self.model), settings, ALONE)

    def loss(self, seed: int | None) -> Tensor:
        generator = torch.Generator().manual_seed(seed or 0)
        images = torch.rand(8, 1, 8, 8, generator=generator)
        if seed is not None:
            seed_everything(seed)
        return F.cross_entropy(self.model(images), torch.arange(8))

    def step(self, rechecked: int | None, seeded: bool = True) -> list[Tensor]:
        """All gradients, buffers and the loss."""
        for micro_batch in self.gradients.micro_batches(rechecked):
            self.gradients.add(self.loss(micro_batch if seeded else None))
        loss = self.gradients.reduce()
        return [loss, *(p.grad for p in self.model.parameters()), *self.model.buffers()]


@pytest.mark.parametrize("name", MODELS)
def test_computing_twice_gives_the_bits_of_computing_once(name: str):
    once, twice = Rig(name), Rig(name)
    for rechecked in range(MICRO_BATCHES):
        for one, other in zip(once.step(None), twice.step(rechecked), strict=True):
            assert torch.equal(one, other)


def faulty_on(call: int, module: nn.Module) -> None:
    """Flip the last bit of the gradient of the module's weight, the `call`-th time that it is computed."""
    calls = 0

    def wrong(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        gradient = gradient.clone()
        if calls == call:
            flip(gradient, bit=0)
        return gradient

    module.weight.register_hook(wrong)


@pytest.mark.parametrize("micro_batch", range(MICRO_BATCHES))
@pytest.mark.parametrize("computation", [1, 2])
def test_wrong_bit_is_caught_in_either_computation_of_any_micro_batch(micro_batch: int, computation: int):
    rig = Rig()
    faulty_on(micro_batch + computation, rig.model.features[3])
    with pytest.raises(Disagreement) as caught:
        rig.step(micro_batch)
    assert caught.value.exit_code == 4 and caught.value.local
    assert str(caught.value).startswith(
        f"micro-batch {micro_batch}: computed twice on {AT}, the gradient differs in features.3.weight: "
    )


def test_what_is_computed_once_is_not_compared():
    rig = Rig()
    faulty_on(2, rig.model.head)
    rig.step(None)
    rig.step(MICRO_BATCHES - 1)


@pytest.mark.parametrize("name", MODELS)
def test_computation_that_does_not_repeat_is_caught(name: str):
    rig = Rig(name)
    seed_everything(1)
    with pytest.raises(Disagreement, match="or an operation is not repeatable"):
        rig.step(2, seeded=False)


def test_every_micro_batch_has_its_turn_to_be_computed_twice(config: Config):
    def turns(every: int, steps: int = 24) -> list[tuple[int, int]]:
        integrity = config.integrity.model_copy(update={"recompute_every": every})
        requested, model = config.model_copy(update={"integrity": integrity}), nn.Linear(1, 1)
        plan = Plan(1000, config.parallel.global_batch, config.parallel.micro_batches, config.seed)
        optimizer = Optimizers(torch.optim.SGD(model.parameters()), model)
        loop = Loop(requested.options, ALONE, plan, steps, State(model, optimizer))
        every_step = [(number, Step(loop, number)) for number in range(steps)]
        return [(n, micro_batch) for n, step in every_step if (micro_batch := step._rechecked()) is not None]

    assert turns(0) == []
    assert turns(3) == [(3 * n, n % config.parallel.micro_batches) for n in range(8)]
    assert turns(1) == [(n, n % config.parallel.micro_batches) for n in range(24)]
