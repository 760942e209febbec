"""Sharded weights, gradients and optimizer state: the same bits, whatever a rank holds."""

import json
from pathlib import Path

import pytest
import torch
from cutting import SAMPLES
from safetensors.torch import load_file
from states import content, parallel_of, state_of
from support import TESTS, Trained, trained
from torch import nn
from warm import PACKAGE, Warm

from samebits.checkpoint.checkpoint import found
from samebits.core.errors import UserError
from samebits.core.fsdp import Full
from samebits.core.optimizers import Optimizers
from samebits.core.ranks import World
from samebits.core.shardable import require_elementwise, units_of
from samebits.core.shards import Scattered, Shard
from samebits.core.state import State
from samebits.guards.updates import Updates

CPU = torch.device("cpu")
QUIET = "tracking.enabled=false", "parallel.global_batch=256"  # few steps
MODELS = {
    "transformer": ("model.name=transformer", "model.depth=2"),
    "bfloat16": ("model.name=transformer", "model.depth=2", "compute.precision=bfloat16"),
}


class Alone:
    """What one process gives, made once for each model."""

    def __init__(self, folder: Path, prepared: Path) -> None:
        self._folder, self._prepared = folder, prepared
        self._made: dict[str, Trained] = {}

    def __call__(self, model: str) -> Trained:
        """The training of this model."""
        if model not in self._made:
            self._made[model] = trained(self._folder / model, self._prepared, *QUIET, *MODELS[model])
            assert self._made[model].done.returncode == 0, self._made[model].done.stderr
        return self._made[model]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"), prepared)


def require_same(one: Trained, other: Trained) -> None:
    """The same weights file to the last byte, the same trace root and the same metrics."""
    assert one.done.returncode == 0, one.done.stderr
    assert one.weights == other.weights
    for name in ("trace/steps.bin", "metrics.json"):
        assert (one.out / name).read_bytes() == (other.out / name).read_bytes(), name
    assert content(one.out) == content(other.out)


# Each model with each way; test_worlds.py combines them all, on smaller models, and test_verify.py has the convnet.
WAYS = [
    *(("full", 2, "bfloat16"), ("full", 3, "transformer")),
    *(("optimizer", 2, "transformer"), ("optimizer", 3, "bfloat16")),
]


@pytest.mark.long
@pytest.mark.parametrize(("shard", "ranks", "model"), WAYS)
def test_shards_change_no_bit(alone: Alone, prepared: Path, tmp_path: Path, shard: str, ranks: int, model: str):
    here = trained(tmp_path / "run", prepared, *QUIET, *MODELS[model], f"parallel.shard={shard}", ranks=ranks)
    require_same(here, alone(model))


@pytest.mark.long
def test_replicas_change_no_bit(alone: Alone, prepared: Path, tmp_path: Path):
    """Two groups of 2 ranks, that hold the whole each."""
    keys = (*MODELS["transformer"], "parallel.shard=full", "parallel.replicas=2", "integrity.compare_every=1")
    here = trained(tmp_path / "run", prepared, *QUIET, *keys, ranks=4)
    require_same(here, alone("transformer"))
    newest = found(here.out / "checkpoints")[-1]
    assert len(list(newest.glob("model-*"))) == 2, "one replica writes"


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 2), (2, 2)])
def test_replicas_that_ranks_do_not_make_are_refused(ranks: int, replicas: int):
    model, settings = nn.Linear(32, 32), parallel_of(8, shard="full", replicas=replicas)
    with pytest.raises(UserError, match=rf"^parallel\.replicas={replicas} given with {ranks} ranks: "):
        Full(state_of(model), settings, World(0, ranks, CPU), ())


CAREFUL = ("trace.level=tensor", "integrity.compare_every=1", "checkpoint.every=2")


@pytest.mark.long
def test_every_tensor_is_seen_as_it_is_where_it_lies_whole(prepared: Path, tmp_path: Path):
    """The digests of each tensor in each step; the values of one step, after which the run stops and goes on."""
    one, *others = ways = {tmp_path / "none": None, tmp_path / "optimizer": 2, tmp_path / "full": 3}
    for out, ranks in ways.items():
        keys = f"parallel.shard={out.name}", f"integrity.recompute_every={int(out != one)}"
        stops = trained(out, prepared, *QUIET, *CAREFUL, *keys, "trace.values=3", ranks=ranks)
        assert "stopped as trace.values asks after step 4" in stops.done.stderr, stops
        ends = trained(out, prepared, *QUIET, *CAREFUL, *keys, ranks=ranks)
        assert ends.done.returncode == 0, ends
    of_rank_0 = "batch ", "output "
    whole, *cuts = (load_file(out / "trace" / "values.safetensors") for out in ways)
    names = [name for name in whole if not name.startswith(of_rank_0)]
    assert len(names) > 20
    for other, cut in zip(others, cuts, strict=True):
        for name in ("model.safetensors", "trace/steps.bin", "trace/tensors.bin", "trace/tensors.json", "metrics.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
        assert all(torch.equal(whole[name], cut[name]) for name in names)


# ---- what can be sharded


def test_group_without_parameters_has_nothing_to_try():
    weight = nn.Parameter(torch.ones(3))
    groups = [{"params": [weight]}, {"params": [], "lr": 0.1}]
    require_elementwise(torch.optim.AdamW(groups, fused=True))
    with pytest.raises(UserError, match="Adafactor does not update each element by itself"):
        require_elementwise(torch.optim.Adafactor(groups))
    assert torch.equal(weight, torch.ones(3)) and weight.grad is None


def test_sharded_gradients_are_used_or_dropped_as_whole_ones():
    weight = nn.Linear(32, 32, bias=False).weight
    model = nn.ParameterList([weight])
    shard = Shard(weight.detach().view(-1)[:512], (0, 512, 1024), weight.shape, World(0, 2, CPU))
    optimizer = torch.optim.SGD(model.parameters())
    optimizers = Optimizers(optimizer, model)
    updates = Updates(State(model, optimizers))
    (part,) = optimizers.cut({weight: shard}).values()
    updates.ready, weight.grad, part.grad = True, Scattered(shard), torch.ones(512)
    assert updates.forgotten
    optimizer.zero_grad()  # how a loop leaves the weights alone
    assert weight.grad is not None and not updates.forgotten
    updates.close(None)


def test_units_are_modules_inside_the_model_and_apart():
    act = nn.ReLU()  # without weights, so it may stand in several
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), act) for _ in range(3)), nn.Linear(32, 32))
    assert units_of(model) == list(model)
    for units in ([nn.Linear(1, 1)], [model], [model[0], model[0][0]], [model[0], model[0]]):
        with pytest.raises(UserError, match=r"run\.steps\(units=\.\.\.\): "):
            units_of(model, units)


def test_weights_that_two_units_share_are_refused():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    units_of(model, list(model))
    model[2].weight = model[0].weight
    units_of(model, [model[1]])  # both lie in the rest
    with pytest.raises(UserError, match=r"0\.weight: shared by two units"):
        units_of(model, list(model))


# ---- each part of the exactness, broken on purpose

SCRIPT = TESTS / "cutting.py"


def cut(
    folder: Path, prepared: Path, fault: str, ranks: int | None, shard: str = "full", *more: str
) -> tuple[int, str, str]:
    """Exit code, output, and the digest of the weights of a training whose sums are hard."""
    keys = ("tracking.enabled=false", f"data.prepared={prepared}", f"parallel.global_batch={SAMPLES}")
    keys += (f"parallel.micro_batches={SAMPLES}", f"parallel.shard={shard}", "parallel.timeout_seconds=20", *more)
    out, message = folder / f"{shard}-{ranks}", folder / f"{shard}-{ranks}.err"
    code = Warm(PACKAGE, fault, str(out), *keys, out=message, err=message, ranks=ranks, script=SCRIPT).wait()
    digest = out / "weights.json"
    return code, message.read_text(), json.loads(digest.read_text()) if digest.exists() else ""


@pytest.mark.long
def test_hard_sums_are_the_same_when_sharded(prepared: Path, tmp_path: Path):
    ways = [(None, "none"), (2, "none"), (3, "optimizer"), (3, "full")]
    seen = [cut(tmp_path, prepared, "nothing", ranks, shard) for ranks, shard in ways]
    assert [code for code, _, _ in seen] == [0] * len(ways), seen
    assert len({digest for _, _, digest in seen}) == 1


@pytest.mark.long
def test_norm_of_the_norms_of_shards_depends_on_the_world_size(prepared: Path, tmp_path: Path):
    two, three = (cut(tmp_path, prepared, "stock_norm", ranks) for ranks in (2, 3))
    assert two[0] == three[0] == 0, (two, three)
    assert two[2] != three[2]


LINES = {
    "odd_cuts": "parallel.shard: AdamW does not update each element by itself",
    "torch_clips": "to clip gradients, or for their norm, call samebits.clip_grad_norm_",
}


@pytest.mark.parametrize("fault", ["odd_cuts", pytest.param("torch_clips", marks=pytest.mark.long)])
@pytest.mark.parametrize("shard", ["full", pytest.param("optimizer", marks=pytest.mark.long)])
def test_fault_that_can_be_seen_is_refused_in_a_line(fault: str, shard: str, prepared: Path, tmp_path: Path):
    code, message, digest = cut(tmp_path, prepared, fault, 2, shard)
    assert code == 1 and not digest, message  # 2, the launcher's is 1
    assert LINES[fault] in message and "Traceback" not in message, message


@pytest.mark.long
def test_missing_pass_never_ends_in_a_number(prepared: Path, tmp_path: Path):
    code, message, digest = cut(tmp_path, prepared, "missing_pass", 3)
    assert code != 0 and not digest, message
