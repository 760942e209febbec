"""Each resume repeats a step: who stops a run makes one beyond its saved state, and what comes of it is compared."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt import inside
from faulty import Faulty
from loops import Numbers, Parts, loss_of
from project.config import Config
from support import OURS, PACKAGE
from torch import Tensor, nn

from samebits import front
from samebits.base.files import read_json, write_json
from samebits.checkpoint import checkpoint, repeated, stop
from samebits.record import names
from samebits.record.reading import metric_rows
from samebits.run import Run

pytestmark = pytest.mark.usefixtures("as_a_stage")
STEPS, SAVED = 5, 2
STOPPED = f"stopped as trace.values asks after step {SAVED}; the same command goes on from there\n"

Memory = Callable[[], float]  # what a process remembers from step to step, and no checkpoint holds
Attempt = Callable[..., tuple[int, str]]


def counter_of_a_module() -> Memory:
    memory = {"calls": 0}

    def scale() -> float:
        memory["calls"] += 1
        return float(memory["calls"])

    return scale


def counter_of_a_closure() -> Memory:
    calls = count(1)
    return lambda: float(next(calls))


def cached_call() -> Memory:
    """A transform that keeps what it had made of the first step's number."""
    numbers = count(1)

    @lru_cache
    def made(number: int) -> int:
        return number * 2

    def scale() -> float:
        made(next(numbers))
        return float(made.cache_info().misses)

    return scale


class Scaled(nn.Module):
    """What the model computes, by what is remembered."""

    def __init__(self, scale: Memory) -> None:
        super().__init__()
        self._scale = (scale,)

    def forward(self, batch: Tensor) -> Tensor:
        return batch * self._scale[0]()


class Many(Numbers):
    """So many samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % 100)


def loop(run: Run, in_forward: Memory | None = None, in_update: Memory | None = None, samples: int = 10_000) -> None:
    """A plain loop. Its process remembers something in the model, or in the update."""
    parts = Parts(run)
    parts.dataset = Many(samples)
    if in_forward:
        parts.model = nn.Sequential(Scaled(in_forward), *parts.model)
        parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    for step in parts.steps(run, STEPS):
        for batch in step:
            step.backward(loss_of(parts.model, batch))
        if in_update:
            scale = in_update()
            for parameter in parts.model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * scale
        parts.optimizer.step()
        step.log(loss=step.loss)
    run.finish()


@pytest.fixture
def attempt(
    config: Config, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Attempt:
    """A function that runs a loop as a stage does, to its end or to a stop; its exit code, and what it said."""
    monkeypatch.setattr(stop, "QUICK", float("inf"))  # the machine may be slow

    def attempt(body: Callable[[Run], None], out: str = "run", level: str = "step", stops: int = -1) -> tuple[int, str]:
        settings = inside(config, prepared, workers=0)
        trace = settings.trace.model_copy(update={"level": level, "values": stops})

        def stage(config: Config, out: Path) -> None:
            with Run(OURS, config, out) as run:
                body(run)

        capsys.readouterr()
        code = 0
        try:
            front.call(OURS, stage, settings.model_copy(update={"trace": trace}), tmp_path / out)
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().err

    return attempt


def saved(out: Path) -> list[int]:
    return [int(path.name[:9]) for path in checkpoint.found(out / names.CHECKPOINTS)]


@pytest.mark.parametrize("memory", [counter_of_a_module, counter_of_a_closure, cached_call])
def test_state_that_no_checkpoint_holds_is_found_by_the_step_that_is_made_again(
    memory: Callable[[], Memory], attempt: Attempt, tmp_path: Path
):
    """In the loss, or in the weights alone; also where nothing is traced. Nothing is lost or written over."""
    for level, where, phase in [
        ("step", "in_forward", "loss"),
        ("step", "in_update", "weights"),
        ("off", "in_forward", "loss"),
        ("off", "in_update", "weights"),
    ]:
        out = tmp_path / f"{level}-{where}"
        code, said = attempt(lambda run, w=where: loop(run, **{w: memory()}), out.name, level, SAVED - 1)
        assert (code, said) == (143, STOPPED)
        assert saved(out) == [SAVED] and read_json(out / names.NEXT)["step"] == SAVED
        rows = {path: path.read_bytes() for path in [out / names.METRIC_ROWS, *out.glob(names.STEP_ROWS)]}
        for _ in range(2):  # a second attempt finds the same
            code, said = attempt(lambda run, w=where: loop(run, **{w: memory()}), out.name, level)
            assert code == 1 and said.startswith(f"step {SAVED}, made again: {phase} has other bits than before "), said
            assert said.count("\n") == 1 and "samebits docs resume" in said
        assert saved(out) == [SAVED] and rows == {path: path.read_bytes() for path in rows}


@pytest.mark.parametrize("level", ["step", "off"])
def test_step_that_is_made_again_leaves_no_trace_in_a_run(level: str, attempt: Attempt, tmp_path: Path):
    """The clean control: stopped twice, the second time before the last step, it is the same run."""
    assert attempt(loop, "alone", level) == (0, "")
    for stops in (1, 3):
        assert attempt(loop, "run", level, stops)[0] == 143
        assert len((tmp_path / "run" / names.METRIC_ROWS).read_text().splitlines()) == stops + 2
    assert attempt(loop, "run", level) == (0, "")
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert not (run / names.NEXT).exists()
    kept = [names.WEIGHTS, *([names.STEP_ROWS] if level == "step" else [])]
    assert all((alone / name).read_bytes() == (run / name).read_bytes() for name in kept)
    assert stated(alone) == stated(run)


@pytest.mark.parametrize(("level", "ends"), [("step", 0), ("off", 1)])
def test_number_that_does_not_repeat_ends_a_run_only_where_nothing_else_is_compared(
    level: str, ends: int, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
):
    log, calls = Run.log, count()
    monkeypatch.setattr(Run, "log", lambda run, step, /, **found: log(run, step, clock=float(next(calls)), **found))
    assert attempt(loop, "run", level, SAVED - 1) == (143, STOPPED)
    code, said = attempt(loop, "run", level)
    assert code == ends and said.startswith(f"step {SAVED}, made again: clock is ") and said.count("\n") == 1, said


def stated(out: Path) -> dict[str, Any]:
    """What the receipt of a run states of its bits."""
    receipt = read_json(out / names.RECEIPT)
    names_of_bits = ("address", "environment", "metrics", "trace")
    return {"subject": receipt["subject"]} | {name: receipt["predicate"][name] for name in names_of_bits}


def failing(error: Exception) -> Callable[[Run], None]:
    """A loop that fails once, in the step beyond its saved state."""

    def body(run: Run) -> None:
        steps = run.steps

        def until(*given: Any, **named: Any) -> Iterator[Any]:
            for step in steps(*given, **named):
                if step.number == SAVED:
                    raise error
                yield step

        run.steps = until  # type: ignore[method-assign]
        loop(run)

    return body


def test_failure_in_the_step_beyond_costs_nothing(attempt: Attempt, tmp_path: Path):
    assert attempt(loop, "alone")[0] == 0
    code, said = attempt(failing(ValueError("gone")), stops=SAVED - 1)
    assert code == 143 and said.endswith("goes on from there. The step after it failed: ValueError: gone\n"), said
    assert saved(tmp_path / "run") == [SAVED] and not (tmp_path / "run" / names.NEXT).exists()
    assert attempt(loop) == (0, "")
    assert stated(tmp_path / "run") == stated(tmp_path / "alone")
    with pytest.raises(ValueError, match="gone"):  # the control: no state is saved for a resumed run
        attempt(failing(ValueError("gone")), "control")


def test_disk_that_is_full_in_the_step_beyond_costs_nothing(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    assert attempt(loop, "alone")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(repeated, "write_json", full)
        code, said = attempt(loop, stops=SAVED - 1)
    assert code == 1 and "free some space; the same command goes on" in said, said
    assert saved(tmp_path / "run") == [SAVED]
    assert attempt(loop) == (0, "")
    assert stated(tmp_path / "run") == stated(tmp_path / "alone")


@pytest.mark.parametrize("comparable", [True, False])
def test_another_class_of_environment_makes_the_rows_anew(comparable: bool, attempt: Attempt, tmp_path: Path):
    """There equal bits are promised by nobody."""
    assert attempt(lambda run: loop(run, counter_of_a_closure()), stops=SAVED - 1)[0] == 143
    out = tmp_path / "run"
    if not comparable:
        there = read_json(out / names.ENVIRONMENT)
        write_json(out / names.ENVIRONMENT, there | {"preimage": there["preimage"] | {"threads": 2}})
    code, said = attempt(lambda run: loop(run, counter_of_a_closure()))
    assert (code, "not the same run" in said, "another numeric environment" in said) == (
        (1, True, False) if comparable else (0, False, True)
    )
    steps = [row["step"] for row in metric_rows(out)]
    assert steps == ([*range(SAVED + 1)] if comparable else [*range(STEPS), STEPS - 1])


@pytest.mark.parametrize(
    ("quick", "samples", "beyond"),
    [(float("inf"), 10_000, True), (0.0, 10_000, False), (float("inf"), 150, False)],
    ids=["quick", "slow", "an epoch ends, and none has before"],
)
def test_step_beyond_is_made_where_it_is_known_to_be_quick(
    quick: float, samples: int, beyond: bool, attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Who sends SIGTERM is in a hurry, and the end of an epoch may evaluate. The state is saved in any case."""
    monkeypatch.setattr(stop, "QUICK", quick)
    code, message = attempt(lambda run: loop(run, samples=samples), stops=SAVED - 1)
    assert code == 143 and f"stopped as trace.values asks after step {SAVED};" in message
    rows = (tmp_path / "run" / names.METRIC_ROWS).read_text().splitlines()
    assert saved(tmp_path / "run") == [SAVED] and len(rows) == SAVED + beyond


def test_two_ranks_that_hold_shards_find_it(prepared: Path, tmp_path: Path):
    """Found by rank 0, in a run in which the other one remembers; an unsharded resume of one process is the control."""
    keys = ("tracking.enabled=false", "loader.workers=0", "parallel.shard=full", f"data.prepared={prepared}")
    for folder in ("first", "again"):
        (tmp_path / folder).mkdir()
    first = Faulty(PACKAGE, tmp_path / "first", "remembers", 1, 2, *keys, "trace.values=3")
    assert "stopped as trace.values asks after step 4" in first.message and saved(first.out) == [4], first.message
    assert read_json(first.out / names.NEXT)["step"] == 4
    first.out.rename(tmp_path / "again" / "run")
    again = Faulty(PACKAGE, tmp_path / "again", "remembers", 1, 2, *keys)
    assert again.code == 1 and "step 4, made again: loss has other bits than before" in again.message, again.message
