"""`samebits verify`: every way to train gives the same bits, and one that does not is named."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from clone import verb
from project.config import Config
from server import until, until_gone
from support import OURS, PACKAGE, TESTS
from warm import PATIENCE, Warm

from samebits.analysis import verify as verify_module
from samebits.analysis.verify import ONCE, VARIED, WAYS, Row, Way, chosen, train_in_all_ways
from samebits.config.params import load
from samebits.core.errors import RunError, UserError
from samebits.core.ranks import ALONE
from samebits.core.shards import Scattered, Shard
from samebits.record import names
from samebits.start import trainings

Verify = Callable[..., dict[str, Row]]
OWNED, FULL = "optimizer sharded on 2 ranks", "weights sharded on 2 ranks"


@pytest.fixture
def verified(config: Config, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """A function that verifies with warm trainings, one rank of which may be at fault; the rows by name."""
    fault: list[str] = []

    def start(way: Way, settings: Mapping[str, Any]) -> Warm:
        script = TESTS / "faulty.py" if fault else None
        before = [*fault, str(tmp_path), PACKAGE] if fault else []
        arguments = ["--out", str(way.folder), *trainings.overrides(settings)]
        ranks = way.ranks if way.ranks > 1 else None
        return Warm(*before, *arguments, out=way.log, err=way.log, ranks=ranks, script=script)

    monkeypatch.setattr(verify_module, "FOLDER", tmp_path / "verify")

    def verified(
        *at_fault: str,
        places: int = 4,
        ways: Sequence[str] = (),
        vary: Mapping[str, Any] = verify_module.NOTHING,
        **keys: Any,
    ) -> dict[str, Row]:
        fault[:] = at_fault
        requested = {"train.epochs": 1, "data.prepared": str(prepared)} | keys
        rows = train_in_all_ways(OURS, config, places, start, requested, lambda text: None, chosen(ways), vary)
        return {row.name: row for row in rows}

    return verified


@pytest.mark.long
def test_every_way_gives_the_same_bits(verified: Verify):
    rows = verified(vary={"checkpoint.keep": 1}, **{"parallel.global_batch": 128})
    assert list(rows) == [ONCE.name, *(way.name for way in WAYS)]
    assert {name: row.verdict for name, row in rows.items()} == dict.fromkeys(rows, "EQUAL")
    assert len({row.weights for row in rows.values()}) == 1
    assert {name for name, row in rows.items() if not row.trace} == {"no trace"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "equal", "differs"),
    [
        ("gradient", ("one process", "once more"), ("2 ranks",)),
        ("shard", ("one process", "2 ranks"), (OWNED, FULL)),
    ],
)
def test_rank_that_computes_otherwise_is_seen_in_its_rows_alone(
    fault: str, equal: tuple[str, ...], differs: tuple[str, ...], verified: Verify
):
    rows = verified(fault, "1", ways=(*equal[1:], *differs), **{"parallel.global_batch": 128})
    wanted = dict.fromkeys(equal, "EQUAL") | dict.fromkeys(differs, "DIFFERS")
    assert {name: row.verdict for name, row in rows.items()} == wanted


@pytest.mark.long
@pytest.mark.parametrize(("fault", "verdict"), [((), "EQUAL"), (("evaluation", "0"), "DIFFERS")])
def test_evaluation_midway_that_changes_the_model_is_seen(fault: tuple[str, ...], verdict: str, verified: Verify):
    midway = {"train.evaluate_every": 1}
    rows = verified(*fault, ways=(VARIED.name,), vary=midway, **{"train.epochs": 2})
    assert rows[VARIED.name].verdict == verdict


@pytest.mark.long
def test_state_that_the_second_epoch_begins_with_is_seen_where_a_late_kill_loses_it(verified: Verify):
    rows = verified("second_epoch", "0", ways=("once more", "killed and resumed"), **{"train.epochs": 2})
    *equal, killed = (row.verdict for row in rows.values())
    # where the kill comes late, on a busy machine, the resumed run meets a step that is recorded already
    assert equal == ["EQUAL", "EQUAL"] and killed != "EQUAL", rows
    assert killed == "DIFFERS" or "before the interruption: the resumed run is not the same run" in killed, rows


def test_training_that_fails_is_told(verified: Verify):
    (row,) = verified(**{"train.learning_rate": 1e30, "train.warmup": 0.0, "model.name": "transformer"}).values()
    assert row.verdict.startswith("FAILED: ") and "the gradient is not finite" in row.verdict


@pytest.mark.long
def test_more_ranks_than_places_and_no_key_to_vary_are_not_tried_and_said_so(verified: Verify):
    rows = verified(places=2, ways=("4 ranks", VARIED.name))
    assert rows["4 ranks"].verdict.startswith("not tried: 2 places")
    assert rows[VARIED.name].verdict == "not tried: verify.vary in params.yaml names no key"


# ---- the ways that one asks for


def test_all_ways_are_tried_unless_some_are_named_and_an_unknown_one_is_refused():
    assert list(chosen([])) == list(WAYS)
    assert [way.name for way in chosen(["killed and resumed", "once more"])] == ["once more", "killed and resumed"]
    with pytest.raises(UserError, match=r"^--only 'twice': no such way to train; known: once more; 2 loader workers;"):
        chosen(["once more", "twice"])
    done = verb("verify", "--only", "twice")
    assert done.exit_code == 2 and done.stderr.startswith("--only 'twice': ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shorten=[train.epoch=1]", "shorten does not fit: --set train.epoch: unknown key; did you mean train.epochs?"),
        ("vary=[train.epoch=1]", "vary does not fit: --set train.epoch: unknown key; "),
        ("vary=[seed=1]", "vary: seed is not neutral, so it asks for another run; leave"),
        ("vary=[train.shift=2]", "vary: train.shift is not neutral, so it asks for "),
        ("vary=[device=cpu]", "vary: device is not neutral, so it asks for another run"),
    ],
)
def test_key_that_is_not_neutral_or_does_not_fit_is_refused_by_name(
    override: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(OURS.root)
    done = verb("verify", "--set", f"verify.{override}")
    assert (done.exit_code, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"params.yaml: verify.{message}"), done.stderr


@pytest.mark.parametrize(("words", "asks"), [((), {"train.epochs": 2}), (("--full",), {})])
def test_full_verification_shortens_no_training(
    words: tuple[str, ...], asks: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """And varies the same neutral keys; no training is started here."""
    seen: list[Any] = []

    def train(project: Any, config: Config, places: int, start: None, settings: Any, report: Any, *more: Any) -> Any:
        seen.extend([config.train.epochs, settings, more[-1]])
        return [Row(ONCE.name, "EQUAL")]

    monkeypatch.chdir(OURS.root)
    monkeypatch.setattr(trainings, "prepared", lambda *given: None)
    monkeypatch.setattr(verify_module, "starting", lambda *given: nullcontext())
    monkeypatch.setattr(verify_module, "train_in_all_ways", train)
    done = verb("verify", *words, "--only", "once more", "--set", "seed=5")
    epochs = asks.get("train.epochs", load(Config).train.epochs)
    assert seen == [epochs, {**asks, "seed": 5}, {"train.evaluate_every": 1}], done.output


# ---- a way that the training refuses

REFUSAL = "parallel.shard: Adafactor does not update each element by itself, so use another one"


@pytest.mark.parametrize(
    ("way", "code", "said", "verdict"),
    [
        (OWNED, 2, ["told before", REFUSAL], f"not tried: {REFUSAL}"),
        (OWNED, 2, ["\x1b[2Jone" + 80 * " more"], r"not tried: \x1b[2Jone" + 57 * " more" + " …"),
        (OWNED, 2, [], "not tried: refused without a word"),
        (OWNED, 1, [REFUSAL], f"FAILED: it ended with 1:\n{REFUSAL}"),
        (OWNED, -9, [], "FAILED: it ended with -9:"),
        ("2 ranks", 2, [str(line) for line in range(20)], f"FAILED: it ended with 2:\n8\n9\n{'%s'}"),
    ],
)
def test_refusal_of_shards_alone_is_no_failure(
    way: str, code: int, said: list[str], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verify_module, "FOLDER", tmp_path)
    row = tried(way, code, said)
    assert row.verdict == verdict.replace("%s", "\n".join(str(line) for line in range(10, 20)))
    assert not row.weights


def tried(way: str, code: int, said: list[str]) -> verify_module.Row:
    """The row of a training that says this and ends with this code."""

    def start(way: Way, settings: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
        way.log.write_text("".join(f"{line}\n" for line in said))
        end = f"import os; os._exit({code})" if code >= 0 else f"import os; os.kill(os.getpid(), {-code})"
        return subprocess.Popen([sys.executable, "-c", end])

    return verify_module._train(OURS, *chosen([way]), {}, start)


def test_refusal_of_torchs_clip_is_shown_as_one_sentence_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = Scattered(Shard(torch.ones(4), (0, 4), weight.shape, ALONE))
    with pytest.raises(UserError) as refused:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    monkeypatch.setattr(verify_module, "FOLDER", tmp_path)
    verdict = tried(OWNED, 2, [str(refused.value)]).verdict
    assert verdict.startswith("not tried: linalg_vector_norm cannot take a gradient that is sharded over the ranks: ")
    assert "call samebits.clip_grad_norm_" in verdict and verdict.endswith(" parallel.shard=none")


@pytest.mark.parametrize(
    ("verdicts", "message", "code"),
    [
        (["EQUAL", "EQUAL", "not tried: it refuses"], "EQUAL: 2 of 2 trainings", 0),
        (["EQUAL", "not tried: it refuses"], "NOT COMPARED: 1 of 1 trainings", 1),
        (["EQUAL", "DIFFERS", "not tried: it refuses"], "DIFFERS: 1 of 2 trainings", 1),
        (["FAILED: so"], "DIFFERS: 0 of 1 trainings", 1),
    ],
)
def test_way_that_is_not_tried_counts_for_nothing(
    verdicts: list[str], message: str, code: int, monkeypatch: pytest.MonkeyPatch
):
    rows = [verify_module.Row(f"way {number}", verdict) for number, verdict in enumerate(verdicts)]
    monkeypatch.setattr(verify_module, "train_in_all_ways", lambda *given: iter(rows))
    monkeypatch.chdir(OURS.root)
    done = verb("verify", "--ranks", "1")
    assert (done.output.splitlines()[-1], done.exit_code) == (message, code), done


# ---- the kill: a training in place of which a script runs, which makes checkpoints and then ends or waits


def test_kills_lie_before_and_behind_an_epochs_end_and_in_the_last_third():
    kills = {way.name: way.instant(45, 2.004) for way in WAYS if way.ended}
    assert kills == {
        "killed and resumed": 34,
        "killed and resumed on 2 ranks": 23,
        "stopped by SIGTERM and resumed": 15,
    }
    assert [verify_module.behind_an_epoch(*length) for length in ((23, 1.02), (12, 0.3), (90, 4.0))] == [11, 6, 23]


Started = tuple[list[int], Callable[[], "subprocess.Popen[bytes]"]]
Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A function that has trainings end by themselves, one after another with these codes, the last one never."""

    def start(*codes: int) -> Started:
        started: list[int] = []

        def training() -> "subprocess.Popen[bytes]":
            code = codes[len(started)] if len(started) < len(codes) else None
            text = f"import os, sys, time; os.makedirs({str(tmp_path / 'run' / names.CHECKPOINTS)!r}); "
            made = "[os.makedirs(f'run/checkpoints/{step:09d}-0') for step in (6, 18, 12)]; time.sleep(3600)"
            text += f"os.chdir({str(tmp_path)!r}); {made}" if code is None else f"sys.exit({code})"
            started.append(0 if code is None else 1)
            return subprocess.Popen([sys.executable, "-c", text], start_new_session=True)

        return started, training

    return start


# Which codes the trainings before one that waits for its end have, and how often one is started. That of one that fails
# is not started again to be killed: the next start, without a kill, says why.
@pytest.mark.parametrize(("codes", "count"), [((), 1), ((0,), 2), ((0, 0), 3), ((0, 0, 0), 3), ((3,), 1)])
def test_training_that_is_too_quick_for_a_kill_is_started_again(
    start: Start, codes: tuple[int, ...], count: int, tmp_path: Path
):
    started, training = start(*codes)
    message = r"ended before it was killed: make it longer, see verify\.shorten"
    with pytest.raises(RunError, match=message) if codes == (0, 0, 0) else nullcontext():
        verify_module._kill(training, tmp_path / "run", 12, signal.SIGKILL)
    assert len(started) == count
    assert (tmp_path / "run" / names.CHECKPOINTS).is_dir()


def test_training_that_is_killed_late_goes_on_from_the_step_that_was_wanted(start: Start, tmp_path: Path):
    folder = tmp_path / "run" / names.CHECKPOINTS
    for by in (signal.SIGTERM, signal.SIGKILL):
        _, training = start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify_module, "PAUSE", 0.01)
            verify_module._kill(training, tmp_path / "run", 12, by)
        steps = [step for step, _ in verify_module._checkpoints(tmp_path / "run")]
        assert folder.is_dir() and (by == signal.SIGTERM or max(steps) <= 12)


# ---- who interrupts a verification

INTERRUPTED = """
import sys, time
from pathlib import Path
from samebits.base.project import Project
from samebits.start import trainings
from samebits.analysis import verify
from samebits.analysis.verify import ONCE, chosen

PROJECT = Project.at(Path.cwd())

def start(way, settings):
    code = "import os, time; os.write(1, str(os.getpid()).encode()); time.sleep(3600)"
    return trainings.start(PROJECT, [sys.executable, "-c", code], Path(sys.argv[1]))

verify.FOLDER = Path(sys.argv[1]).parent
verify._train(PROJECT, *chosen([sys.argv[2]]), {}, start, 20)
"""


@pytest.mark.parametrize("way", ["once more", "killed and resumed"])
def test_interruption_ends_the_training_too(way: str, tmp_path: Path):
    """Which does not get Ctrl-C itself."""
    log = tmp_path / "log"
    log.touch()
    words = [sys.executable, "-c", INTERRUPTED, str(log), way]
    parent = subprocess.Popen(words, stderr=subprocess.DEVNULL, cwd=OURS.root)
    pid = int(until(log.read_text))
    parent.send_signal(signal.SIGINT)
    assert parent.wait(PATIENCE) != 0
    until_gone(pid)
