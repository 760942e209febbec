"""Whole runs, as a user starts them: what must not change a bit, and what must."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attempt import inside
from faulty import EVERY, Faulty
from project.config import Config
from safetensors.torch import load_file
from support import PACKAGE, python, train_here, trained, training
from warm import PATIENCE

from samebits import run as run_module
from samebits.address.manifest import sha256_file
from samebits.core import flags, plan, sampling
from samebits.core import loop as loop_module
from samebits.core import ranks as world
from samebits.core.seeds import PURPOSES, derive


def weights(out: Path) -> str:
    return sha256_file(out / "model.safetensors")


Train = Callable[..., str]


@pytest.fixture
def train(tmp_path: Path, prepared: Path) -> Train:
    """A function that trains and returns the SHA-256 of the weights."""

    def run(*settings: str, ranks: int | None = None) -> str:
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        ended = trained(out, prepared, "tracking.enabled=false", *settings, ranks=ranks)
        assert ended.done.returncode == 0, ended.done.stderr
        return ended.weights

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """The run directory of one process without workers, started as a user does."""
    out = tmp_path_factory.mktemp("alone") / "run"
    done = python("-m", "samebits", "train", *training(out, prepared, "tracking.enabled=false"))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


QUICK = [(None, 1), (3, 2)]
SLOW = [pytest.param(1, 2, marks=pytest.mark.long)]


@pytest.mark.parametrize(("ranks", "workers"), [*QUICK, *SLOW])  # test_verify.py has more
def test_world_size_and_workers_do_not_change_a_bit(train: Train, alone: Path, ranks: int | None, workers: int):
    assert train(f"loader.workers={workers}", ranks=ranks) == weights(alone)


EXPLODE = "train.learning_rate=1e30", "train.warmup=0", "model.name=transformer"
FEW = "parallel.global_batch=256"  # steps
OTHERS = {"bfloat16": ("compute.precision=bfloat16",), "skipped steps": (*EXPLODE, "compute.nonfinite=skip")}


@pytest.mark.long
@pytest.mark.parametrize("other", OTHERS)
def test_other_settings_keep_their_bits_too(train: Train, other: str):
    assert train(FEW, *OTHERS[other]) == train(FEW, *OTHERS[other], ranks=3)


@pytest.mark.long
def test_compiled_training_comes_to_its_end(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its kernels are modules that no lock has. They add in another order than those of torch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    settings = "tracking.enabled=false", FEW, "compute.compile=true", "model.depth=1"
    one, two = (trained(tmp_path / out, prepared, *settings, ranks=n) for out, n in (("one", None), ("two", 2)))
    assert (one.done.returncode, two.done.returncode) == (0, 0), one.done.stderr + two.done.stderr
    assert list((tmp_path / "kernels").rglob("*.so"))
    assert one.weights == two.weights


def test_another_seed_gives_other_bits(train: Train, alone: Path):
    assert train("seed=1") != weights(alone)


@pytest.mark.long
def test_sum_of_the_backend_gives_other_weights_on_three_ranks(prepared: Path, tmp_path: Path, alone: Path):
    """The planted fault: weights depend on the world size if an all-reduce adds the gradients."""
    keys = f"data.prepared={prepared}", "tracking.enabled=false"
    seen = {fault: Faulty(PACKAGE, tmp_path / fault, fault, EVERY, 3, *keys) for fault in ("nothing", "all_reduce")}
    assert {ran.code for ran in seen.values()} == {0}, [ran.message for ran in seen.values()]
    assert weights(seen["nothing"].out) == weights(alone) != weights(seen["all_reduce"].out)


def test_process_group_outlives_its_other_owners():
    """The reducer of the user's DistributedDataParallel must not be the last owner: the end of a run may hang."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    owners = sys.getrefcount(group)
    world.leave()
    assert not dist.is_initialized()
    assert [group] == world._left and sys.getrefcount(group) <= owners


THREADS = """
import atexit, pathlib, time

def threads():
    return " ".join(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm"))

atexit.register(lambda: print("at the end:", threads()))  # runs after those that are registered later
import torch.distributed as dist
from samebits.core import ranks as world
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world.leave()
while "gloo" not in (before := threads()):  # a thread has no name yet when it begins
    time.sleep(0.01)
print("before:", before)
"""


def test_no_thread_of_gloo_meets_the_end_of_the_interpreter():
    """It would abort the process if it asked for the interpreter's lock then, after the rank's last word."""
    words = [sys.executable, "-c", THREADS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    before, end = done.stdout.splitlines()
    assert "gloo" in before and "gloo" not in end


def test_run_directory_holds_what_is_promised(alone: Path):
    names = {path.name for path in alone.iterdir()}
    assert {"model.safetensors", "metrics.json", "environment.json", "address.json"} <= names
    steps = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    metrics = json.loads((alone / "metrics.json").read_text())
    assert sorted({row["step"] for row in steps}) == list(range(metrics["steps"]))
    assert all(len(load_file(alone / "model.safetensors")[name].shape) >= 1 for name in ("head.weight", "head.bias"))


def test_every_switch_is_effective_in_a_run(alone: Path):
    effective = json.loads((alone / "environment.json").read_text())["preimage"]["flags"]
    portable = flags.can_be_portable()
    assert {s.name: s.strict for s in flags.FLAGS if portable or not s.portable}.items() <= effective.items()


@pytest.mark.long
def test_more_ranks_than_micro_batches_are_refused(tmp_path: Path, prepared: Path):
    keys = f"data.prepared={prepared}", "tracking.enabled=false", "parallel.micro_batches=1"
    ran = Faulty(PACKAGE, tmp_path, "nothing", 0, 2, *keys)
    assert ran.message.count("world size 2 seen, at most parallel.micro_batches=1 wanted") == 1, ran.message
    assert ran.codes == {0: "2", 1: "2"} and not ran.out.exists()


def test_nonfinite_gradient_stops_the_run_and_is_named(tmp_path: Path, prepared: Path):
    done = trained(tmp_path / "run", prepared, "tracking.enabled=false", *EXPLODE).done
    assert done.returncode == 3, done.stderr
    named = r"not finite in: position \(largest finite value \S+\), embed\.weight .*and \d+ more"
    assert re.search(named, done.stderr) and "step 1:" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "FAILED"


# ---- inside one process: what each purpose of a seed decides


@pytest.fixture
def digest_with(config: Config, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that trains with the seeds of some purposes replaced, and returns the weights' SHA-256."""

    def run(*purposes: str) -> str:
        def other(root: int, requested: str, *ids: int) -> int:
            return derive(root + (requested in purposes), requested, *ids)

        for module in (run_module, loop_module, plan, sampling):
            monkeypatch.setattr(module, "derive", other)
        torch.manual_seed(99)  # what is left unseeded must show, so let nothing start from a default
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        train_here(inside(config, prepared, workers=0), out)
        return weights(out)

    return run


@pytest.mark.long
def test_every_purpose_of_a_seed_decides_bits(digest_with: Callable[..., str], alone: Path):
    # an evaluation's, and those of a loop with two sums, or with an order or a collate function of its own
    others = {name for name in PURPOSES if name.startswith(("test ", "further ", "placed ")) or "collation" in name}
    found = {purpose: digest_with(purpose) for purpose in PURPOSES if purpose not in others}
    assert len({weights(alone), *found.values()}) == len(found) + 1, found
    assert digest_with(*others) == weights(alone)


def test_evaluation_and_other_environment_variables_do_not_disturb_training(
    train: Train, alone: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UNRELATED", "1")
    assert train("train.evaluate_every=1000") == weights(alone)
