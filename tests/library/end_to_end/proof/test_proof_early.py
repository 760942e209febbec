"""Early parts of a run's proof: beside the run, or while its ranks have stopped for want of room."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from clone import edit, project_in
from project.config import Config
from proving import ALONE, AT_ITS_PLACE, FINISH, ended, planted, started, words
from server import until
from support import PACKAGE
from warm import PATIENCE

from samebits.base.files import read_json
from samebits.config.params import load
from samebits.core.errors import RunError
from samebits.prove import choice, fresh, proof, setting
from samebits.prove.segments import Segment
from samebits.record import names
from samebits.record.receipt import read
from samebits.start import anew, trainings


def test_part_that_has_no_room_beside_the_run_is_trained_at_its_end_and_not_named_as_left_out(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    part, config = Segment(0, 3), load(Config, clean / "params.yaml", ["prove.when=early"])
    made = proof.Proof(project_in(clean), config, tmp_path, 1, [part], lambda: False)

    def compared(*given: object) -> Iterator[None]:
        yield
        return "" if made._ended else "no room", None

    monkeypatch.setattr(made._trainer, "start", lambda rows: iter([None]))
    monkeypatch.setattr(made._trainer, "compared", compared)
    monkeypatch.setattr(made, "_possible", lambda steps: [(0, part)])
    monkeypatch.setattr(made, "_kept", lambda: {0})
    assert [made.look(3) for _ in range(99)] == [False] * 99 and not made._done and made._failed
    stated = made.make(3)
    assert len(stated["segments"]) == 1 and {*stated["not_tried"]} <= {proof.RANKS}
    assert {*stated["changed"]} == {fresh.ELSEWHERE, *(row.name for row in setting.ROWS)}


class Crowded(proof.Proof):
    """The proof of a run beside which there is no room."""

    room, said = False, "out of memory"

    def _tried(self, segment: Segment, ways: Sequence[choice.Choice], rows: object) -> Iterator[None]:
        yield
        if not self.room:
            raise RunError(self.said)
        self._done[segment] = ways[0]

    def _possible(self, steps: int) -> list[tuple[int, Segment]]:
        return [*enumerate(self._segments)]

    def _kept(self) -> set[int]:
        return {segment.first for segment in self._segments}


@pytest.fixture
def crowded(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Crowded]:
    """A function: the proof of a run of a hundred steps with such keys, in a command that was begun as by hand."""
    held, parts = project_in(clean), [Segment(step, step + 3) for step in (0, 20, 30, 97)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(anew, "_begun", [])
    monkeypatch.setattr(anew, "_handed", {})
    anew.remember(held)
    return lambda *keys: Crowded(
        held, load(Config, clean / "params.yaml", [*keys]), tmp_path, 1, parts, lambda: False, lambda: ["rng"]
    )


def test_run_stops_for_its_early_parts_once_both_are_recorded(crowded: Callable[..., Crowded]):
    made = crowded("prove.when=early")
    assert [made.look(step, 100 - step) for step in range(23)] == [False] * 23
    assert made.look(23, 77) and not made.found


@pytest.mark.parametrize("why", ["end", "late", "stopped before", "edited", "another part"])
def test_run_does_not_stop_where_that_gives_nothing(
    why: str, crowded: Callable[..., Crowded], monkeypatch: pytest.MonkeyPatch
):
    """Nor where the same command would not go on, for its code has changed."""
    made = crowded("prove.when=end" if why == "end" else "prove.when=early")
    if why == "stopped before":
        anew._handed["steps"] = 3
    if why == "edited":
        monkeypatch.setattr(anew, "_params", lambda project: b"other")
    made._done |= dict.fromkeys(made._segments[:2], made._own) if why == "another part" else {}
    steps = [50] * 99 if why == "late" else [*range(24)] * 4 + [33] * 99
    assert not any(made.look(step, 100 - step) for step in steps) and made._failed


@pytest.mark.parametrize("said", ["CUDA out of memory", "the process that loads torch ended with -9"])
def test_part_that_was_trained_while_the_run_had_stopped_is_not_trained_again(
    said: str, crowded: Callable[..., Crowded]
):
    made = crowded("prove.when=early")
    made.said = said
    made.room = True
    made.early(30, 0.0, [])
    made.room = False
    stated = made.go_on(lambda: False, list).make(100)
    assert [each["first"] for each in stated["segments"]] == [0, 20]
    assert stated["not_tried"]["steps 97 to 99"] == said  # which is no contradiction


def test_run_goes_on_where_its_early_parts_cannot_be_trained_though_it_has_stopped(crowded: Callable[..., Crowded]):
    made = crowded("prove.when=early")
    anew._handed["steps"] = 30
    made.early(**anew._handed, began=0.0, moved=[])
    assert not made.found and not any(made.go_on(lambda: False, list).look(step, 100) for step in range(30, 99))
    made.room = True
    assert len(made.make(100)["segments"]) == 4


def test_what_a_command_hands_on_fits_into_a_variable(crowded: Callable[..., Crowded]):
    made = crowded("prove.when=early")
    assert made.handed() == {"began": made._began, "moved": ["rng"]}
    made._moved = lambda: ["x" * 10**6] * 10**4
    assert len(json.dumps(made.handed())) < 1 << 16


ROOM = """
import fcntl, os
from pathlib import Path

FILES = [Path({folder!r}, rank).open("w") for rank in "01"]


def take():
    if "/.proof/" not in __file__:
        return fcntl.flock(FILES[int(os.environ.get("RANK", "0"))], fcntl.LOCK_EX)
    try:
        [fcntl.flock(each, fcntl.LOCK_SH | fcntl.LOCK_NB) for each in FILES]
    except OSError:
        raise RuntimeError("out of memory") from None


def leave():
    [fcntl.flock(each, fcntl.LOCK_UN) for each in FILES]
"""
SLOW = "time.sleep((run.out / '.proof').exists())"  # else the run is over before it is known that there is no room
TORCHRUN = "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2", "-m"


@pytest.fixture
def full(project: Path, tmp_path: Path) -> Path:
    """A project of whose code a part finds room only while no process of the run has called it."""
    package = project / "src" / PACKAGE
    (package / "room.py").write_text(ROOM.format(folder=str(tmp_path)))
    edit(
        package / "train.py",
        ("import time\nimport samebits as sb\n", "import time\nimport samebits as sb\n\nfrom . import room\n"),
        ("    settings = ", "    room.take()\n    settings = "),
        ("        step.log(", f"        {SLOW}\n        step.log("),
        (FINISH, f"    room.leave()\n{FINISH}"),
    )
    edit(project / "vendor" / "samebits" / "prove" / "proof.py", ("[setting.ROWS, *without, ", "[setting.ROWS] or ["))
    return project


def by_hand(project: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start `python -m ARGUMENTS` in a project, as a user does: this process can become its command again."""
    path = os.pathsep.join(project_in(project).path)
    with project.with_suffix(".log").open("wb") as log:
        env = os.environ | {"PYTHONPATH": path, trainings.PROVE: ""}
        return subprocess.Popen([sys.executable, "-m", *words], cwd=project, env=env, stdout=log, stderr=log)


def early(project: Path) -> list[str]:
    """A training of some epochs that is to find early what it forgets."""
    return words(project, "parallel.micro_batches=2", "train.epochs=8", "prove.when=early", "prove.segments=2")


@pytest.mark.long
def test_run_stops_for_early_parts_that_have_no_room_beside_it_and_no_bit_changes(full: Path):
    out, own = full / "made", early(full)
    ended(full, *own, "--set", "prove.when=never")
    process = by_hand(full, *TORCHRUN, "samebits", *own, "--fresh")
    assert process.wait(PATIENCE) == 0, full.with_suffix(".log").read_text()
    printed = full.with_suffix(".log").read_text()
    assert len(re.findall("(?m)^stopped after step .* have no room beside it; ", printed)) == 1
    assert printed.count("resumed ") == 1 and "proof      EQUAL: steps 0 to 4, 5 to 9, " in printed
    (former,) = (out / names.EARLIER).iterdir()
    one, other = read(former), read(out)
    assert one.weights == other.weights and one.stated["trace"] == other.stated["trace"]
    assert len(other.stated["proof"]["segments"]) == 3


@pytest.mark.long
def test_what_a_run_forgets_is_found_while_its_ranks_have_stopped(full: Path):
    planted(full, "MEMORY['calls'] += self.training; scale = 1.0 + (MEMORY['calls'] > 3) / 64")
    process = by_hand(full, "samebits", *words(full, ALONE, "train.epochs=40", "prove.when=early"))
    printed = full.with_suffix(".log")
    assert process.wait(PATIENCE) == 1, printed.read_text()
    assert "model.MEMORY['calls']" in printed.read_text() and "resumed " not in printed.read_text()
    found, out = read_json(full / "made" / names.CONTRADICTION), full / "made"
    assert found["segment"]["first"] > 0 and found["cause"] == "a fresh process"
    assert not (out / names.WEIGHTS).exists() and not (out / names.PROOF).exists()
    assert read_json(out / names.RUN)["status"] == "FAILED"


@pytest.mark.long
def test_sigterm_is_heeded_while_the_ranks_have_stopped_and_the_same_command_goes_on(full: Path):
    own, log = early(full), full.with_suffix(".log")
    process = by_hand(full, "samebits", *own, "--ranks", "2")
    until(lambda: "stopped after step" in log.read_text() or process.poll() is not None)
    until(lambda: (full / "made" / names.PROOF).exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143 and "resumed " not in log.read_text(), log.read_text()
    assert "resumed " in ended(full, *own, "--set", "prove.when=never", ranks=2)  # which takes less time


@pytest.mark.long
def test_run_on_one_core_proves_itself_early_and_no_bit_changes(proved: tuple[Path, str], clean: Path):
    """Beside it, though no core is free. The second part follows the first one, long before the epoch's end."""
    process = started(clean, *words(clean, "train.epochs=2", "prove.when=early", "prove.segments=2", out="made-early"))
    os.sched_setaffinity(process.pid, [*os.sched_getaffinity(0)][:1])
    assert process.wait() == 0, clean.with_suffix(".log").read_text()
    one, other = read(proved[0]), read(clean / "made-early")
    assert one.weights == other.weights and one.stated["trace"] == other.stated["trace"]
    stated = other.stated["proof"]
    assert [each["first"] for each in stated["segments"]][:2] == [0, 5] and len(stated["segments"]) == 3
    assert stated["not_tried"][setting.CORES] == "there is one core"


@pytest.mark.long
def test_run_that_contradicts_itself_early_ends_early(project: Path):
    planted(project, AT_ITS_PLACE)
    edit(project / "src" / PACKAGE / "train.py", ("        step.log(", f"        {SLOW}\n        step.log("))
    printed = ended(project, *words(project, ALONE, "prove.when=early", "prove.steps=6", "train.epochs=5000"), code=1)
    assert "The run contradicts itself" in printed and read_json(project / "made" / names.RUN)["status"] == "FAILED"
    assert not (project / "made" / names.WEIGHTS).exists()
