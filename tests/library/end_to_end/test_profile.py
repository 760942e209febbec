"""A profile of some steps shows the model's operations, and changes no bit."""

import json
from pathlib import Path

import pytest
import torch
from attempt import STEPS
from support import Trained, trained

from samebits.core.errors import UserError
from samebits.core.ranks import ALONE
from samebits.record import names
from samebits.record.former import TRACED
from samebits.record.receipt import read
from samebits.trace.profile import Profile, steps_of

PLAIN = "tracking.enabled=false"


def events(out: Path, rank: int = 0) -> set[str]:
    """The names of what a profile shows."""
    return {str(each.get("name")) for each in json.loads((out / names.rank_profile(rank)).read_text())["traceEvents"]}


@pytest.mark.parametrize("ranks", [None, 2])
def test_profile_shows_the_operations_of_its_steps_and_changes_no_bit(
    ranks: int | None, untracked: Trained, prepared: Path, tmp_path: Path
):
    """With one that begins with the first step, whose operations the guard of portability looks at as well."""
    steps = "10:13" if ranks is None else "0:2"
    run = trained(tmp_path / "run", prepared, PLAIN, f"trace.profile={steps}", ranks=ranks)
    assert run.done.returncode == 0, run.done.stderr
    one, other = read(run.out).stated, read(untracked.out).stated
    assert run.weights == untracked.weights and one["trace"] == other["trace"] and one["trace"]
    assert one["address"] == other["address"] and one["environment"] == other["environment"]
    for rank in range(ranks or 1):
        seen = events(run.out, rank)
        assert {"aten::conv2d", "aten::convolution_backward", "Optimizer.step#AdamW.step"} <= seen
        first, stop = map(int, steps.split(":"))
        assert {name for name in seen if name.startswith("step ")} == {f"step {n}" for n in range(first, stop)}
        assert TRACED.fullmatch(Path(names.rank_profile(rank)).name)  # what a later run moves aside with the rest
    assert not (untracked.out / names.rank_profile(0)).exists()


def test_steps_that_the_run_does_not_have_are_refused_in_a_line(prepared: Path, tmp_path: Path):
    run = trained(tmp_path / "run", prepared, PLAIN, "trace.profile=20:24")
    said = f"--profile 20:24: this run has {STEPS} steps, 0:{STEPS} at most wanted\n"
    assert (run.done.returncode, run.done.stderr) == (2, said)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="this run has 4 steps"):
        steps_of("3:5", 4)
    assert steps_of("3:4", 4) == range(3, 4) and not steps_of("", 4)  # the controls


def test_loop_that_ends_among_the_steps_leaves_what_there_is(tmp_path: Path):
    class View:
        step, done = 3, 4

    observer = Profile(range(3, 9), tmp_path, ALONE)
    observer.begin_step(View())  # type: ignore[arg-type]
    torch.ones(3).cumsum(0)
    observer.close(None)
    assert {"aten::cumsum", "step 3"} <= events(tmp_path)
    observer.close(None)
