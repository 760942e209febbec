"""The trace: its root is the same on any world size, at any level; its first difference is found by bisection."""

import hashlib
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attempt import STEPS, inside
from faulty import Faulty
from loops import Parts, loss_of
from project.config import Config
from support import OURS, PACKAGE, train_here

from samebits import front
from samebits.analysis import diff
from samebits.base.files import read_json
from samebits.core.errors import Preempted, RunError, UserError
from samebits.core.observer import View
from samebits.core.ranks import World
from samebits.core.state import State
from samebits.record.chain import HAS_WEIGHTS, STEP, SUM, Chain
from samebits.record.chains import first_difference, rows
from samebits.run import Run
from samebits.trace import trace
from samebits.trace.trace import Trace


def bits(out: Path) -> tuple[bytes, bytes]:
    """The two chains of a run at level `tensor`."""
    return (out / "trace" / "steps.bin").read_bytes(), (out / "trace" / "tensors.bin").read_bytes()


def traced(config: Config, prepared: Path, out: Path, level: str, workers: int = 0, **integrity: int) -> Path:
    """Train for one epoch in this process."""
    settings = inside(config, prepared, workers)
    sections = {
        "trace": settings.trace.model_copy(update={"level": level}),
        "integrity": settings.integrity.model_copy(update=integrity),
    }
    train_here(settings.model_copy(update=sections), out)
    return out


@pytest.fixture(scope="module")
def reference(config: Config, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, no worker, level `tensor`."""
    return traced(config, prepared, tmp_path_factory.mktemp("reference") / "run", "tensor")


def test_world_size_does_not_change_the_trace(reference: Path, prepared: Path, tmp_path: Path):
    settings = "tracking.enabled=false", f"data.prepared={prepared}", "trace.level=tensor"
    ran = Faulty(PACKAGE, tmp_path, "nothing", 0, 2, *settings)
    assert ran.code == 0, ran.message
    assert bits(ran.out) == bits(reference)
    equal, lines = diff.report(diff.load(reference), diff.load(ran.out))
    assert equal, lines
    sides = sorted(path.name for path in (ran.out / "trace").glob("rank*"))
    assert sides == ["rank0000.jsonl", "rank0001.jsonl"]


def test_workers_and_recomputing_do_not_change_the_trace(
    reference: Path, config: Config, prepared: Path, tmp_path: Path
):
    before = active_children()
    assert bits(traced(config, prepared, tmp_path, "tensor", workers=2, recompute_every=1)) == bits(reference)
    assert [*{*active_children()} - {*before}] == []  # the workers have ended with the run


def test_workers_end_with_a_run_that_is_stopped(config: Config, prepared: Path, tmp_path: Path):
    """At once: else the process waits 5 s for each, as it ends."""
    before, settings = active_children(), inside(config, prepared, 1)
    stops = {"trace": settings.trace.model_copy(update={"values": 2})}
    with pytest.raises(Preempted) as stopped:
        train_here(settings.model_copy(update=stops), tmp_path)
    assert stopped.tb and [*{*active_children()} - {*before}] == []


@pytest.mark.parametrize("level", ["step", "off"])
def test_level_changes_neither_root_nor_weights(
    level: str, reference: Path, config: Config, prepared: Path, tmp_path: Path
):
    out = traced(config, prepared, tmp_path, level)
    assert (out / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    assert (out / "trace").is_dir() == (level == "step")
    if level == "step":
        assert (out / "trace" / "steps.bin").read_bytes() == bits(reference)[0]
        assert not (out / "trace" / "tensors.bin").exists()


def test_rows_hold_what_happened(reference: Path):
    steps = rows(reference / "trace" / "steps.bin", STEP)
    assert steps.itemsize == 64 and len(steps) == STEPS
    assert steps["step"].tolist() == list(range(STEPS))
    for field in ("batch", "loss", "gradient"):
        assert len(set(steps[field].tolist())) == STEPS, field
    with_weights = [*range(0, STEPS, trace.WEIGHTS_EVERY), STEPS - 1]
    assert np.flatnonzero(steps["flags"] & HAS_WEIGHTS).tolist() == with_weights
    link = bytes(24)
    for row in steps:
        link = hashlib.sha256(link + row.tobytes()[:40]).digest()[:24]
        assert row["link"].tobytes() == link, "a hash of all before"
    assert link.hex() == read_json(reference / "run.json")["tags"]["repro.trace"]


# ---- steps of several sums


def summed_twice(out: Path, config: Config, prepared: Path, stop: int | None, changed: bool = False) -> Path:
    """A training whose steps have two sums each; it may stop after so many, or have another loss in a second sum."""

    def stage(config: Config, out: Path) -> None:
        with Run(OURS, config, out) as run:
            parts = Parts(run)
            for step in parts.steps(run):
                for number in range(2):
                    for batch in step:
                        factor = 2 if changed and step.number == 1 and number else 1
                        step.backward(factor * loss_of(parts.model, batch))
                parts.optimizer.step()
                run._stop.came = step.number == stop
            run.finish()

    requested = inside(config, prepared, 0)
    requested = requested.model_copy(update={"trace": config.trace.model_copy(update={"level": "tensor"})})
    with suppress(SystemExit):
        front.call(OURS, stage, requested, out)
    return out


@pytest.mark.usefixtures("as_a_stage")
def test_each_sum_of_a_step_has_a_row(config: Config, prepared: Path, tmp_path: Path):
    out = summed_twice(tmp_path / "out", config, prepared, None)
    steps = rows(out / "trace" / "steps.bin", STEP)
    assert [(row["step"], row["flags"] >> SUM) for row in steps] == [
        (step, number) for step in range(3) for number in (0, 1)
    ]
    assert [bool(row["flags"] & HAS_WEIGHTS) for row in steps] == [False, True, False, False, False, True]
    pairs = zip(steps[::2], steps[1::2], strict=True)
    assert all(one["batch"] == other["batch"] and one["gradient"] != other["gradient"] for one, other in pairs)
    resumed = summed_twice(tmp_path / "resumed", config, prepared, 0)
    assert len(rows(resumed / "trace" / "steps.bin", STEP)) == 2
    assert bits(summed_twice(resumed, config, prepared, None)) == bits(out)
    changed = summed_twice(tmp_path / "changed", config, prepared, None, changed=True)
    place = diff.first_place(*map(diff.load, (out, changed)))
    assert place and str(place).startswith("step 1, sum 1, loss") and diff.load(out).traced == 3
    assert diff.report(*map(diff.load, (out, changed)))[1][1] == "equal before: 1 steps"


# ---- the chain


def test_batches_enter_with_the_micro_batch_that_sees_them(tmp_path: Path):
    batches = [[torch.arange(4.0)], [torch.arange(4.0) + 1]]

    def share(*order: int) -> list[int]:
        message = Trace("step", tmp_path / "trace", World(0, 1, torch.device("cpu")))
        model = torch.nn.Linear(1, 1)
        loop: Any = SimpleNamespace(state=State(model, None))
        message.begin(loop.state, 0, outputs=False)
        message.begin_step(View(loop, 0))
        for place, micro_batch in enumerate(order):
            message.batch(View(loop, 0, micro_batch, batches[place]))
        model(torch.ones(1)).backward()
        message.gradients(View(loop, 0, loss=torch.zeros((), dtype=torch.float64)))
        return message.ballot(View(loop, 0)).sums.tolist()

    assert share(0, 1) == share(0, 1) != share(1, 0)


def grow(written: Chain, first: int, stop: int, odd: int | None = None) -> None:
    """Append rows of 8 bytes, one of which may be another."""
    for row in range(first, stop):
        written.append((row + 1000 * (row == odd)).to_bytes(8, "little"), row)


def chain(path: Path, count: int, odd: int | None = None) -> Path:
    """A chain of such rows."""
    grow(Chain(path, 8), 0, count, odd)
    return path


NUMBER = np.dtype([("number", "<u8")])


def test_torn_row_is_cut_and_the_chain_goes_on(tmp_path: Path):
    path, whole = chain(tmp_path / "torn", 5), chain(tmp_path / "whole", 8).read_bytes()
    for bytes_left in range(5 * 32 - 31, 5 * 32):
        path.write_bytes(whole[:bytes_left])
        going_on = Chain(path, 8, position=4)
        assert path.read_bytes() == whole[: 4 * 32]
        grow(going_on, 4, 8)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("odd", range(4, 8))
def test_row_that_comes_again_differently_is_found(odd: int, tmp_path: Path):
    going_on = Chain(chain(tmp_path / "chain", 8), 8, position=4)
    with pytest.raises(RunError, match=f"step {odd}, made again: row in"):
        grow(going_on, 4, 8, odd)
    grow(Chain(tmp_path / "chain", 8, position=4), 4, 8)  # the control


@pytest.mark.parametrize("byte", [0, 31, 3 * 32 + 5, 4 * 32 - 1])
def test_altered_row_is_found_before_the_run_goes_on(byte: int, tmp_path: Path):
    path = chain(tmp_path / "chain", 8)
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"chain: row {byte // 32} is not what was written: the trace is damaged"):
        Chain(path, 8, position=5)


def test_rows_that_are_not_there_are_not_gone_on_from(tmp_path: Path):
    with pytest.raises(UserError, match=r"5 steps seen, 6 wanted.*Begin the run anew in another folder"):
        Chain(chain(tmp_path / "chain", 5), 8, position=6)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_first_difference_is_found_wherever_it_is(count: int, tmp_path: Path):
    one = rows(chain(tmp_path / "one", count), NUMBER)
    assert first_difference(one, rows(chain(tmp_path / "longer", count + 3), NUMBER)) is None
    for odd in range(count):
        other = rows(chain(tmp_path / f"odd{odd}", count + 2, odd), NUMBER)
        assert first_difference(one, other) == first_difference(other, one) == odd


class Counted:
    """A million links, equal up to a place; counts how many are looked at."""

    def __init__(self, equal: int) -> None:
        self.equal, self.looks = equal, 0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, key: Any) -> Any:
        if key == "link":
            return self
        self.looks += 1
        return 0 if key < self.equal else id(self)


def test_a_million_steps_are_searched_in_twenty_looks():
    for equal in (0, 1, 777_777, 999_999):
        one, other = Counted(equal), Counted(equal)
        assert first_difference(one, other) == equal  # type: ignore[arg-type]
        assert one.looks <= 22
