"""`samebits cost`: what flags cost, and when that cannot be told from zero."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clone import Forked, project_in, verb
from support import PACKAGE

from samebits.analysis import cost, statistics
from samebits.analysis.cost import ALL, STRICT
from samebits.config.settings import Determinism
from samebits.core.errors import UserError
from samebits.start import trainings

STEPS = 100
DETERMINISM = Determinism(cpu="portable", relax=())
SLOW = "deterministic_debug_mode"
ROWS = len(cost.rows_here(DETERMINISM, "cpu", ()))
CYCLES = cost.fewest_cycles(ROWS)


@dataclass
class Fake:
    """A series of trainings on a noisy machine that grows slower; all but the `cheap` ones take 30 % more of it."""

    cheap: Sequence[str] | None = None  # none: all are
    device: str = "cpu"
    steps: int = STEPS
    made: list[str] = field(default_factory=list)
    rng: Any = field(default_factory=lambda: np.random.default_rng(0))

    def one(self, requested: Any) -> Any:
        """One training."""
        self.made.append(requested.name)
        slower = 1 + 0.01 * len(self.made)
        share = 1.3 if self.cheap is not None and requested.name not in self.cheap else 1.0
        seconds = (0.01 * slower * share * self.rng.lognormal(0, 0.1, self.steps)).tolist()
        seconds[0] = 9.0  # of the first step, which loads much
        receipt = SimpleNamespace(stated={"environment": {"preimage": {"device": self.device}}})
        return SimpleNamespace(
            requested=requested, seconds=lambda: seconds, memory=lambda: int(2**30 * share), bits=share, receipt=receipt
        )

    def make(self, wanted: Sequence[Any]) -> Iterator[Any]:
        """Several."""
        yield from map(self.one, wanted)


def test_planted_cost_is_told_and_no_other_is():
    found = cost.measure(Fake([ALL, SLOW]), DETERMINISM, CYCLES)
    message = [row.flag for row in found.rows if row.seconds.differs_from_zero]
    assert message == [ALL, SLOW] and len(found.rows) == ROWS
    for row in found.rows:
        assert row.seconds.low <= row.seconds.cost_pct <= row.seconds.high
        assert (row.seconds.low <= 30 <= row.seconds.high) == (row.flag in message)
        assert row.memory.cost_pct == pytest.approx(30 if row.flag in message else 0, abs=1e-6)
        assert row.same_bits == (row.flag not in message)
    assert found.record()["determinism_cost_pct"] == found.rows[0].seconds.cost_pct and found.rows[0].flag == ALL
    text = "\n".join(cost.lines(found))
    assert f"Alone, {SLOW} of {ROWS - 1} can be told from zero in time." in text
    assert f"{found.rows[0].seconds.cost_pct:.1f} % more time, 30.0 % more memory" in text


def test_nothing_is_told_where_nothing_costs():
    found = cost.measure(Fake(), DETERMINISM, CYCLES)
    assert not [row for row in found.rows if row.seconds.differs_from_zero or row.memory.differs_from_zero]
    assert all(row.same_bits for row in found.rows) and found.repeats
    text = "\n".join(cost.lines(found))
    assert "a cost in time cannot be told from zero, a cost in memory cannot be told from zero" in text
    assert f"Alone, none of {ROWS - 1} can be told" in text


def test_first_steps_do_not_count_and_each_training_comes_at_each_place():
    fake = Fake()
    found = cost.measure(fake, DETERMINISM, 3, [ALL, SLOW])
    assert 0.009 < found.rows[0].seconds.strict < 0.02
    order = [STRICT, ALL, SLOW]
    assert fake.made == [*order, *order[1:], *order[:1], *order[2:], *order[:2]]


def test_few_cycles_have_no_interval_and_say_how_many_would():
    found = cost.measure(Fake([ALL]), DETERMINISM, 5, [ALL])
    assert found.rows[0].seconds.low is None and not found.rows[0].seconds.differs_from_zero
    assert "No intervals: 5 cycles seen, --cycles 6 wanted for 1 rows." in cost.lines(found)
    assert cost.measure(Fake([ALL]), DETERMINISM, 6, [ALL]).rows[0].seconds.differs_from_zero


def test_strict_trainings_that_differ_are_told():
    fake = Fake()
    honest = fake.one
    fake.one = lambda requested: SimpleNamespace(**vars(honest(requested)) | {"bits": len(fake.made)})  # type: ignore[method-assign]
    assert "The strict trainings do not repeat. Find out why: samebits verify" in cost.lines(
        cost.measure(fake, DETERMINISM, 2, [ALL])
    )


def test_switches_of_a_gpu_are_measured_on_a_gpu():
    here = cost.rows_here(DETERMINISM, "cpu", ()), cost.rows_here(DETERMINISM, "cuda", ())
    assert here[0] == [name for name in here[1] if not cost.ON_A_GPU.search(name)]
    assert {"CUBLAS_WORKSPACE_CONFIG", "backends.cudnn.benchmark", "cudnn_sdp"} <= {*here[1]} - {*here[0]}


@pytest.mark.parametrize(
    ("determinism", "only", "steps", "said"),
    [
        (Determinism(cpu="portable", relax=("all",)), (), STEPS, "determinism.relax: [all] seen, an empty list wanted"),
        (DETERMINISM, ("nnpack", "nosuch"), STEPS, "--only 'nosuch': no flag that a run here holds; known: all, PY"),
        (DETERMINISM, (), 19, "a training of 19 steps seen, 20 wanted for a time per step"),
    ],
)
def test_bad_input_is_refused(determinism: Determinism, only: Sequence[str], steps: int, said: str):
    fake = Fake(steps=steps)
    with pytest.raises(UserError) as refused:
        cost.measure(fake, determinism, 1, only)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert len(fake.made) == (steps < STEPS)


def test_interval_of_a_median_holds_it_as_often_as_it_says():
    """Against the table of exact levels: of 10 numbers the 2nd and the 9th hold the median with 97.9 %."""
    assert statistics.median_interval(np.arange(10.0)) == (1.0, 8.0)
    assert statistics.median_interval(np.arange(20.0)) == (5.0, 14.0)
    assert statistics.median_interval(np.arange(5.0)) is None and statistics.median_interval(np.arange(6.0)) == (0, 5)
    rng, missed = np.random.default_rng(0), 0
    for _ in range(1000):
        low, high = statistics.median_interval(rng.exponential(size=9)) or (0, 0)
        missed += not low <= np.log(2) <= high
    assert 20 <= missed <= 60  # 3.9 % of 1,000 is 39 +- 6


@pytest.fixture
def slowed(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose forward pass waits under the strict flags."""
    model = project / "src" / PACKAGE / "model.py"
    before = model.read_text()
    waits = "\n\nimport time\n_call = nn.Module.__call__\ndef _wait(self, *args):\n    "
    waits += "if torch.are_deterministic_algorithms_enabled() and isinstance(self, nn.Sequential):\n        "
    waits += "time.sleep(0.06)\n    return _call(self, *args)\nnn.Module.__call__ = _wait\n"
    model.write_text(before + waits)
    monkeypatch.chdir(project)
    monkeypatch.setattr(trainings, "run", Forked(tmp_path))
    yield project
    model.write_text(before)


@pytest.mark.long
def test_cost_is_measured_on_the_training_of_the_project(slowed: Path):
    words = "cost", "--set", "train.epochs=1", "--cycles", "1", "--only", SLOW, "--json"
    done = verb(*words, project=project_in(slowed))
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["flag"] == SLOW and row["seconds"]["strict"] > 8 * 0.06 and row["seconds"]["cost_pct"] > 0
    assert row["same_bits"] and row["memory"]["strict"] > 2**26
    again = verb(*words, project=project_in(slowed))
    assert again.stdout == done.stdout and again.stderr.count("made before") == 1
