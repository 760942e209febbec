"""A run proves itself: it is trained again in part, with all changed that must not matter, before its receipt."""

import os
import re
import signal
from pathlib import Path

import pytest
from clone import edit, project_in
from project.config import Config
from proving import (
    ALONE,
    FINISH,
    FIRST,
    LAST,
    ONE,
    STATE,
    SURROUNDINGS,
    VARIABLE,
    differs,
    ended,
    first_is_quick,
    planted,
    started,
    words,
)
from server import until
from support import OURS, PACKAGE

from samebits.analysis import verify, verify_receipt
from samebits.base.files import read_json
from samebits.config.params import load
from samebits.prove import again, choice, fresh, proof, setting
from samebits.prove.segments import Segment
from samebits.record import names
from samebits.record.receipt import read


def test_receipt_states_which_steps_were_trained_again_and_in_which_circumstances(proved: tuple[Path, str]):
    out, printed = proved
    stated = read(out).stated["proof"]
    begin, end, late = stated["segments"]
    assert (begin["first"], begin["stop"]) == (0, 3) and end["first"] <= 22 < end["stop"] - 1 and late["first"] >= 30
    assert {each["ranks"] for each in stated["segments"]} == {1, 2, 3}
    assert {each["shard"] for each in stated["segments"]} > {"none"} and begin["workers"] == 1
    missing = {row.name for row in setting.ROWS} - {*stated["changed"]}
    assert missing == {*stated["not_tried"]} <= {setting.CORES, "host name"} and fresh.ELSEWHERE in stated["changed"]
    assert read_json(out / names.RUN)["tags"]["repro.proof"].startswith("EQUAL: steps 0 to 2, ")
    assert f"EQUAL: steps 0 to 2, {end['first']} to {end['stop'] - 1}, " in printed


def test_logged_numbers_that_do_not_repeat_are_named(proved: tuple[Path, str]):
    assert read(proved[0]).stated["proof"]["varying"] == ["clock"]


def test_what_follows_the_end_of_a_run_is_done_once(proved: tuple[Path, str]):
    assert (proved[0].parent / "uploaded.txt").read_text() == "once"


def test_check_of_a_receipt_says_what_was_proved(proved: tuple[Path, str], clean: Path):
    lines = verify_receipt.report(project_in(clean), proved[0], None)
    assert any(line.startswith("proof: EQUAL: steps 0 to 2, ") for line in lines)


def test_proof_leaves_nothing_but_what_a_run_without_it_leaves(proved: tuple[Path, str], clean: Path):
    out = clean / "made-unproved"
    ended(clean, *words(clean, "train.epochs=2", "prove.when=never", out=out.name))
    assert {each.name for each in out.iterdir()} == {each.name for each in proved[0].iterdir()}
    kept = [sorted(each.name[:9] for each in (run / names.CHECKPOINTS).iterdir()) for run in (out, proved[0])]
    assert set(kept[0]) <= set(kept[1]) and len(kept[1]) <= 3
    one, other = read(out), read(proved[0])
    assert one.weights == other.weights and one.stated["trace"] == other.stated["trace"]
    assert one.stated["proof"] == {"segments": [], "not_tried": {"proof": "prove.when=never"}}


FAULTS = {
    "state": (STATE, "a fresh process", "saved in no checkpoint: model.MEMORY['calls']\n", ""),
    "variable": (
        VARIABLE,
        "environment variables",
        "it reads a variable",
        "output features.0, micro-batch 0, call 1",
    ),
}


@pytest.mark.parametrize("fault", first_is_quick(FAULTS))
def test_run_that_contradicts_itself_gets_no_receipt_and_its_cause_is_named(fault: str, project: Path):
    body, cause, line, tensor = FAULTS[fault]
    planted(project, body)
    printed, out = ended(project, *words(project, ALONE), code=1), project / "made"
    found = read_json(out / names.CONTRADICTION)
    assert found["cause"] == cause and found["difference"]["phase"] == "loss" and line in printed
    assert f"; its files are kept. {found['advice']}\n" in printed
    assert found["difference"]["tensor"] == tensor and setting.VARIABLES in found["changed"]
    assert not (out / names.RECEIPT).exists() and (out / names.WEIGHTS).is_file() and not (out / names.PROOF).exists()
    page = re.search("(?m)^artifacts(/contradiction.json: .*)\n(.*)$", (OURS.library / "docs" / "prove.md").read_text())
    lines = [re.sub("[0-9a-f]{16}", "…", line) for line in page.groups()]
    assert fault != "variable" or all(line in re.sub("[0-9a-f]{16}", "…", printed) for line in lines)
    first = found["segment"]["first"]
    assert first <= found["difference"]["step"] < found["segment"]["stop"] and (first > 0) == (fault == "state")


MEMORIES = """
import ctypes, itertools, os, tempfile, zlib
from functools import lru_cache
from pathlib import Path

from .model import AROUND

COUNTS, NOW, POSITIONS, C = {"calls": 0}, [0], itertools.cycle(range(7)), ctypes.CDLL(None)
FILE = Path(tempfile.gettempdir(), "memory")


class Seen:
    calls = 0


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


count, cached = counter(), lru_cache(lambda label: NOW[0])


def numbers(step):
    NOW[0], COUNTS["calls"], Seen.calls = step, COUNTS["calls"] + 1, Seen.calls + 1
    FILE.write_text("x" + (FILE.read_text() if FILE.exists() else ""))
    return {
        "dictionary": COUNTS["calls"], "class": Seen.calls, "closure": count(), "cache": cached("label"),
        "iterator": next(POSITIONS), "file": len(FILE.read_text()), "library in C": C.rand(),
        "entropy": int.from_bytes(os.urandom(4)), "own step": step,
    } | {name: zlib.crc32(repr(value).encode()) for name, value in AROUND.items()}
"""


@pytest.mark.long
def test_whatever_remembers_earlier_steps_or_reads_surroundings_is_other_in_the_part_trained_again(project: Path):
    """Of things that no guard knows, and of one that is right; each decides a logged number, which decides no bit.

    TMPDIR has a long name: below it Linux refuses the sockets of loader workers, and the first part has one.
    """
    package = project / "src" / PACKAGE
    (package / "memories.py").write_text(MEMORIES)
    logged = "step.log(**memories.numbers(step.number), clock=", "from . import memories\nimport samebits as sb"
    edit(package / "train.py", ("step.log(clock=", logged[0]), ("import samebits as sb", logged[1]))
    place = project / f"tmp-{'x' * 40}"
    place.mkdir()
    ended(project, *words(project, ALONE, "prove.segments=2"), TMPDIR=str(place))
    seen = {"dictionary", "class", "closure", "cache", "iterator", "file", "library in C", "entropy"}
    stated, around = read(project / "made").stated["proof"], {row.name for row in setting.ROWS}
    if missed := around & {*stated["not_tried"]}:
        assert missed == {"host name"} and os.getuid(), stated["not_tried"]
    assert {*stated["varying"]} - {"clock"} == seen | (around - missed) and stated["segments"][0]["workers"] == 1


AVERAGE = """
    average = [each.detach().clone() for each in model.parameters()]
    for step in run.steps("""
FOLLOW = "step.log(", "[one.lerp_(other.detach(), 0.1) for one, other in zip(average, model.parameters())]; step.log("
RESULT = (
    "    run.finish(",
    "    [one.data.copy_(other) for one, other in zip(model.parameters(), average)]\n    run.finish(",
)


@pytest.mark.long
def test_weights_that_no_step_shows_are_made_again_and_compared(project: Path):
    """Such as an average that the loop holds in a variable, and that becomes the result."""
    edit(project / "src" / PACKAGE / "train.py", ("\n    for step in run.steps(", AVERAGE), FOLLOW, RESULT)
    printed, out = ended(project, *words(project, ALONE), code=1), project / "made"
    found = read_json(out / names.CONTRADICTION)
    steps = read_json(out / names.METRICS)["steps"]
    assert (found["difference"]["phase"], found["difference"]["step"]) == (again.END, steps - 1)
    assert found["difference"]["tensor"] == "weights features.0.weight"
    assert "what follows the last step" in printed and not (out / names.RECEIPT).exists()


def test_run_that_ends_early_has_its_end_trained_again(proved: tuple[Path, str], clean: Path, tmp_path: Path):
    """From its last state before; where that lies more steps back than checkpoints lie apart, it is not tried."""
    steps = read_json(proved[0] / names.METRICS)["steps"]
    segments = [Segment(0, 3), Segment(steps + 10, steps + 13)]
    for every, last in (steps, Segment(0, steps)), (4, None):
        config = load(Config, clean / "params.yaml", [f"checkpoint.every={every}"])
        made = proof.Proof(project_in(clean), config, tmp_path, 1, segments, lambda: False)
        made._recorded = steps
        possible = [(0, segments[0]), *([(1, last)] if last else [])]
        assert made._possible(steps) == possible and bool(made._not_tried) == (last is None)


@pytest.mark.long
def test_run_that_goes_on_from_anothers_state_is_trained_again_from_there(proved: tuple[Path, str], clean: Path):
    """Its trace has no rows of the steps before."""
    longer = words(clean, "train.epochs=3", "prove.segments=1", out="made-longer")
    ended(clean, *longer, "--from", str(proved[0]), "--state")
    (segment,) = read(clean / "made-longer").stated["proof"]["segments"]
    assert segment["first"] == read_json(proved[0] / names.METRICS)["steps"]


@pytest.mark.long
def test_variable_that_the_config_lists_is_the_same_in_each_part(project: Path):
    """Also one that the proof would change otherwise."""
    planted(project, VARIABLE)
    listed = "environment.variables=[PLANTED,TZ,UNSET]"
    assert "proof      EQUAL: " in ended(project, *words(project, ALONE, listed, "prove.segments=1"), TZ="SBT-1")
    stated = read(project / "made").stated
    wanted = {"PLANTED": "by hand", "TZ": "SBT-1", "UNSET": None}
    assert stated["environment"]["preimage"]["own_variables"] == wanted
    assert stated["proof"]["not_tried"]["TZ"] == fresh.LISTED and setting.VARIABLES in stated["proof"]["changed"]


@pytest.mark.long
def test_proof_has_the_code_and_the_config_of_the_runs_begin(project: Path):
    loop = project / "src" / PACKAGE / "train.py"
    keeps = "(run.out / 'proof').mkdir(exist_ok=True); (run.out / 'proof' / 'mine').touch()"
    edit(loop, ("step.log(", f"Path('last.txt').write_text(str(step.number)); {keeps}; step.log("))
    edit(loop, ("import time", "import time\nfrom pathlib import Path"))
    process = started(project, *words(project, ALONE, "prove.segments=1"))
    until(lambda: (project / "last.txt").exists() or process.poll() is not None)
    planted(project, "scale = 2.0")
    edit(project / "params.yaml", ("learning_rate: ", "learning_rate: 9"))
    assert process.wait() == 0, project.with_suffix(".log").read_text()
    assert "proof      EQUAL" in project.with_suffix(".log").read_text()
    assert (project / "made" / "proof" / "mine").exists() and not (project / "made" / names.PROOF).exists()
    assert int((project / "last.txt").read_text()) + 1 == read(project / "made").stated["metrics"]["steps"]


@pytest.mark.long
def test_run_of_ranks_that_shard_its_state_proves_itself(project: Path):
    """It lends the memory of its state, as on a GPU, and has it back after run.finish()."""
    edit(project / "vendor" / "samebits" / "run.py", ('if kind == "cuda" else', "if kind else"))
    parts = "[getattr(each, 'to_local', lambda: each)() for each in model.parameters()]"
    used = f"    print('used', all(each.abs().sum() > 0 for each in {parts} if each.numel()))\n"
    edit(project / "src" / PACKAGE / "train.py", (FINISH, f"{FINISH}{used}"))
    keys = "parallel.micro_batches=2", "parallel.shard=full", "prove.segments=2"
    printed = ended(project, *words(project, *keys), ranks=2)
    assert printed.count("used True") == 2
    stated = read(project / "made").stated["proof"]
    assert {each["ranks"] for each in stated["segments"]} == {1, 2} and proof.RANKS not in stated["not_tried"]


@pytest.mark.long
def test_proof_that_was_interrupted_is_made_up(project: Path):
    own, out = words(project, ALONE), project / "made"
    for by, code in (signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143):
        (out / names.METRICS).unlink(missing_ok=True)
        process = started(project, *own)
        until(lambda made=process: (out / names.METRICS).exists() or made.poll() is not None)
        process.send_signal(by)
        assert process.wait() == code and not (out / names.RECEIPT).exists(), project.with_suffix(".log").read_text()
    assert "EQUAL: steps 0 to 2, " in ended(project, *own) and read(out).stated["proof"]["segments"]


@pytest.mark.long
def test_verify_finds_what_depends_on_circumstances(project: Path):
    """In one way alone. The copy of the project in which it is trained is gone afterwards."""
    planted(project, VARIABLE)
    edit(project / "params.yaml", ("shorten: [train.epochs=2]", f"shorten: [train.epochs=1, model.width=8, {ALONE}]"))
    ways = "once more", "other circumstances"
    printed = ended(project, "verify", *(word for way in ways for word in ("--only", way)), code=1)
    assert re.findall("(?m)^(?:once more|other circumstances) .* (EQUAL|DIFFERS)$", printed) == ["EQUAL", "DIFFERS"]
    assert not (project / verify.FOLDER / verify.COPY).exists()


# ---- a circumstance, a place, or a way alone


def test_circumstance_that_a_run_depends_on_is_found(project: Path, monkeypatch: pytest.MonkeyPatch):
    """And nothing where none changes."""
    planted(project, SURROUNDINGS)
    ended(project, *words(project, ALONE, "prove.when=never"))
    rows = [row for row in setting.ROWS if row.name == "umask"]
    assert differs(project, monkeypatch, (FIRST, ONE), keys=[ALONE]) == [None]
    (found,) = differs(project, monkeypatch, (FIRST, ONE), rows=rows, keys=[ALONE])
    assert found and (found.step, found.phase) == (0, "loss")


RARE = "MEMORY['calls'] += self.training; scale = 1.0 + (20 < MEMORY['calls'] <= 26) / 64"  # steps 10 to 12, of 2 each
RANKS = "import torch.distributed as d; scale += (d.is_initialized() and d.get_rank() * d.get_world_size()) / 64"
IN_WORKERS = "float().unsqueeze(0) / (16 + (torch.utils.data.get_worker_info() is not None))"


@pytest.mark.long
def test_fault_is_found_by_a_part_that_covers_it_or_is_trained_so(project: Path, monkeypatch: pytest.MonkeyPatch):
    """One in some steps, one in loader workers, and one of several ranks; other parts are equal."""
    planted(project, f"{RARE}; {RANKS}")
    few = "parallel.micro_batches=2"
    edit(project / "src" / PACKAGE / "data.py", ("float().unsqueeze(0) / 16", IN_WORKERS))
    ended(project, *words(project, few, "prove.when=never", "checkpoint.every=10", "checkpoint.keep=9"))
    equal = (LAST, ONE), (FIRST, ONE)
    other = (Segment(10, 13), ONE), (FIRST, choice.Choice(1, 1, "none")), (FIRST, choice.Choice(2, 0, "none"))
    found = differs(project, monkeypatch, *equal, *other, keys=[few])
    assert [*map(bool, found)] == [False, False, True, True, True]
