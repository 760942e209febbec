"""Checkpoints in parts: each rank writes its shards, and any ranks read them, bit by bit."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import Faulty
from states import OPTIMIZERS, ORIGIN, Training, content, silent, state_of
from support import Trained, trained
from torch import Tensor, nn
from warm import PACKAGE

from samebits.checkpoint import checkpoint, final, stored
from samebits.core import weights
from samebits.core.errors import RunError
from samebits.core.ranks import World
from samebits.core.shards import Shard, unsharded
from samebits.core.state import State, copy
from samebits.record import names

CPU = torch.device("cpu")
EDGES = (0, 32, 32, 96, 120)  # of the shards of four ranks; one holds nothing


def sharded(tensor: Tensor, rank: int) -> Shard:
    start, stop = EDGES[rank : rank + 2]
    return Shard(tensor.reshape(-1)[start:stop].clone(), EDGES, tensor.shape, World(rank, 4, CPU))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of several formats, with names that mean something else elsewhere."""
    wide = torch.randn(8, 15)
    wide[0, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    return {"a": wide, "a:5": wide.bfloat16(), "a-00001": torch.arange(120).view(2, 3, 20), "b": wide > 0}


def test_shards_are_read_as_they_were(tensors: dict[str, Tensor], tmp_path: Path):
    small = {"scalar": torch.tensor(3.0), "none": torch.zeros(0, 4)}
    for rank in range(4):
        shards = {name: sharded(tensor, rank) for name, tensor in tensors.items()}
        stored.save({**shards, **small}, tmp_path, "model", World(rank, 4, CPU))
    assert len(list(tmp_path.iterdir())) == 5
    there = stored.read(tmp_path, "model")
    assert there.keys() == {*tensors, *small}
    for name, tensor in {**tensors, **small}.items():
        assert there[name].shape == tensor.shape and there[name].dtype == tensor.dtype
        assert same(unsharded(there[name]), tensor), name
    for first, last in [(0, 0), (0, 32), (31, 33), (32, 96), (40, 41), (95, 120), (120, 120)]:
        for name, tensor in tensors.items():
            assert same(there[name].read(first, last), tensor.reshape(-1)[first:last]), (name, first, last)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit: a NaN is itself."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_same_shards_give_the_same_bytes(tensors: dict[str, Tensor], tmp_path: Path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        shards = {name: sharded(tensor, 1) for name, tensor in tensors.items()}
        stored.save(shards, tmp_path / folder, "model", World(1, 4, CPU))
    one, other = ((tmp_path / folder / "model-00001.safetensors").read_bytes() for folder in ("one", "other"))
    assert one == other


def test_weights_are_gathered_into_files_without_a_name(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    there = weights.gathered(state_of(model), tmp_path, World(0, 1, CPU)).state_dict()
    assert list(tmp_path.iterdir()) == [] and there["0.weight"] is there["2.weight"]
    wanted = model.state_dict()
    assert there.keys() == wanted.keys() and all(same(there[name], wanted[name]) for name in wanted)


def tied() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    for layer in model[1:]:
        layer.weight = model[0].weight
    return model


def test_names_of_tied_tensors_are_sorted(tmp_path: Path):
    """Their file would have other bytes each time: safetensors has no order of them."""
    model, other = tied(), tied()
    (tmp_path / names.ADDRESS).touch()
    files = set()
    for _ in range(4):
        final.write(model, tmp_path)
        files.add((tmp_path / names.WEIGHTS).read_bytes())
    assert len(files) == 1
    final.load_weights(other, tmp_path)
    assert all(same(one, there) for one, there in zip(model.parameters(), other.parameters(), strict=True))


class Rounds(torch.optim.AdamW):
    """Loses bits of its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for held in self.state.values():
            held["exp_avg"] = held["exp_avg"].bfloat16().float()


class Own:
    """An object of the loop's own, which takes back what `keeps` names."""

    def __init__(self, *keeps: str) -> None:
        self.keeps, self.held = keeps, {"best": 1.5, "epoch": 3, "seen": torch.ones(2)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held |= {name: state[name] for name in self.keeps}


class Grows(nn.Module):
    """A module whose buffer, which no state_dict holds, is there after a step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None, persistent=False)


ALL = "best", "epoch", "seen"
LOSSES: dict[str, tuple[Any, Any, str | None]] = {  # what is lost by an optimizer or an object, and the name told
    "nothing": (OPTIMIZERS["fused AdamW"], Own(*ALL), None),
    "bits of moments": (Rounds, Own(*ALL), "optimizer['state']['0.bias']['exp_avg'], "),
    "a number": (OPTIMIZERS["fused AdamW"], Own("epoch", "seen"), "state['own']['state']['best']: "),
    "a tensor": (OPTIMIZERS["fused AdamW"], Own("epoch", "best"), "state['own']['state']['seen']: "),
    "a buffer": (OPTIMIZERS["fused AdamW"], Grows(), "state['own']['buffers']['seen']: "),
}


@pytest.mark.parametrize(("optimizer", "own", "message"), LOSSES.values(), ids=LOSSES)
def test_state_that_is_other_after_loading_is_told(optimizer: Any, own: Any, message: str | None, tmp_path: Path):
    training, saved = Training(), Own()
    training.step(2)
    saved.held = {"best": 0.5, "epoch": 4, "seen": torch.zeros(2)}
    if isinstance(own, Grows):
        saved = Grows()
        saved.seen = torch.ones(2)
    taken = State(training.model, training.optimizers, {"own": saved}).look(2).changed(copy)
    checkpoint.write(taken, tmp_path, ORIGIN, 1)
    there, other = checkpoint.newest(tmp_path, ORIGIN, silent), Training(optimizer)
    assert there
    with nullcontext() if message is None else pytest.raises(RunError) as failure:
        State(other.model, other.optimizers, {"own": own}).put(there)
    assert message is None or str(failure.value).startswith(f"the checkpoint after step 2: {message}"), failure.value


# ---- in a training

FEW = "parallel.global_batch=96"  # 15 steps
KEYS = (
    "tracking.enabled=false",
    "model.name=transformer",
    "model.depth=1",
    "checkpoint.every=5",
    "checkpoint.keep=2",
    FEW,
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Trained:
    """One process."""
    return trained(tmp_path_factory.mktemp("alone") / "run", prepared, *KEYS)


def faulty(folder: Path, prepared: Path, fault: str, at: int, *keys: str, **env: str) -> Faulty:
    """Two ranks, of which one is at fault."""
    return Faulty(PACKAGE, folder, fault, at, 2, *KEYS, f"data.prepared={prepared}", *keys, **env)


def require_ends_alike(out: Path, prepared: Path, alone: Trained, *keys: str, ranks: int | None = None) -> str:
    """Go on with a run, and compare its result; what it told."""
    there = trained(out, prepared, *KEYS, *keys, ranks=ranks)
    assert there.done.returncode == 0, there.done.stderr
    assert there.weights == alone.weights and content(out) == content(alone.out)
    return there.done.stdout + there.done.stderr


def steps(out: Path) -> list[int]:
    """After which there are checkpoints."""
    return [int(path.name[:9]) for path in checkpoint.found(out / "checkpoints")]


PHASES = [  # of the second checkpoint: at whose call, which then is the newest whole one, in which shards, resumed how
    (1, "checkpoint.checkpoint write_part 1", 5, "full", "none"),  # before any byte
    (1, "checkpoint.stored save_file 2", 5, "full", "full"),  # between two files of its part
    (1, "checkpoint.saver Saver.seal 1", 5, "optimizer", "none"),  # its part is, but nobody knows
    (0, "checkpoint.checkpoint write_json 1", 5, "full", "none"),  # the state, in the background, as others write
    (0, "checkpoint.checkpoint seal 1", 5, "optimizer", "none"),  # all parts are there
    (0, "checkpoint.checkpoint found 1", 10, "full", "optimizer"),  # with its name; older ones are still there
]


@pytest.mark.parametrize(
    ("at", "call", "newest", "shard", "after"),
    [PHASES[0], *(pytest.param(*phase, marks=pytest.mark.long) for phase in PHASES[1:])],
)
def test_kill_in_each_phase_of_writing_leaves_a_whole_checkpoint(
    alone: Trained, prepared: Path, tmp_path: Path, at: int, call: str, newest: int, shard: str, after: str
):
    ran = faulty(tmp_path, prepared, "dies", at, f"parallel.shard={shard}", OTHER=call)
    assert ran.code != 0 and "Traceback" not in ran.message, ran.message
    assert steps(ran.out)[-1] == newest, "killed at another time"
    ranks = None if after == "none" else 3
    message = require_ends_alike(ran.out, prepared, alone, f"parallel.shard={after}", ranks=ranks)
    assert f"after step {newest}" in message
    assert not list((ran.out / "checkpoints").glob(".*")), "what the crash has left is not cleared"


@pytest.mark.long
def test_ranks_that_see_other_disks_send_the_lead_their_shards(alone: Trained, prepared: Path, tmp_path: Path):
    ran = faulty(tmp_path / "one", prepared, "unseen", 1, "parallel.shard=full", "trace.values=11")
    assert "stopped as trace.values asks after step 12" in ran.message
    newest = checkpoint.found(ran.out / "checkpoints")[-1]
    assert not list(newest.glob("*-0*")), "shards of a rank that rank 0 does not see"
    (tmp_path / "other").mkdir()
    ran.out.rename(tmp_path / "other" / "run")
    ran = faulty(tmp_path / "other", prepared, "unseen", 1, "parallel.shard=optimizer")
    assert ran.code == 0 and "after step 12" in (tmp_path / "other" / "out").read_text(), ran.message
    assert content(ran.out) == content(alone.out)


@pytest.mark.parametrize(("at", "on_error"), [(1, "continue"), pytest.param(0, "stop", marks=pytest.mark.long)])
def test_part_that_cannot_be_written_is_told_and_costs_no_older_checkpoint(
    alone: Trained, prepared: Path, tmp_path: Path, at: int, on_error: str
):
    keys = ("parallel.shard=full", f"checkpoint.on_error={on_error}")
    ran = faulty(tmp_path, prepared, "no_room", at, *keys)
    message = f"no checkpoint was written: [Errno 28] No space left on device (met by rank {at}); "
    assert ran.message.count(message) == 1, ran.message
    assert steps(ran.out) == ([5, 15] if on_error == "continue" else [5])
    assert (ran.code == 0) == (on_error == "continue") and "Traceback" not in ran.message
    if on_error == "continue":
        assert content(ran.out) == content(alone.out)
    else:
        require_ends_alike(ran.out, prepared, alone)


@pytest.mark.long
def test_damaged_part_is_named_and_set_aside(alone: Trained, prepared: Path, tmp_path: Path):
    ran = faulty(tmp_path, prepared, "nothing", 0, "parallel.shard=full", "trace.values=11")
    part = checkpoint.found(ran.out / "checkpoints")[-1] / "optimizer-00001.safetensors"
    with part.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    message = require_ends_alike(ran.out, prepared, alone, "parallel.shard=optimizer", ranks=3)
    assert "is damaged and set aside" in message and str(part.name) in message and "after step 10" in message, message
