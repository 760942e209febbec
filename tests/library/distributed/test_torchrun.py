"""Ranks under our launcher: their own lines come last, and the exit code is theirs."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server import until
from support import TESTS, python, training
from warm import PATIENCE, Warm

from samebits.base.files import read_json
from samebits.checkpoint import checkpoint
from samebits.start.ranks import handling

NAP = 0.02
Launch = Callable[..., "Launched"]


class Launched:
    """Two ranks of a module under the launcher, in processes of their own."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        self.folder, self.temporary = folder, folder / "temporary"
        self._out, self._err = folder / "out", folder / "err"
        self.temporary.mkdir()
        env, script = {"TMPDIR": str(self.temporary)}, TESTS / "ranks.py"
        self.process = Warm(module, *arguments, out=self._out, err=self._err, script=script, env=env)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition."""
        for _ in range(round(PATIENCE / NAP)):
            if condition():
                return
            assert self.process.poll() is None, self.said
            time.sleep(NAP)
        raise AssertionError(f"nothing came: {self.said}")

    def end(self) -> int:
        """Wait for the end; the exit code."""
        return self.process.wait()

    @property
    def said(self) -> list[str]:
        """The lines on standard error."""
        return self._err.read_text().splitlines()

    @property
    def printed(self) -> str:
        """The text on standard output."""
        return self._out.read_text()

    def all_wait(self) -> bool:
        """Whether both ranks wait for a signal, and the launcher is ready to hand it on."""
        return len(self.pids()) == 2 and (self.folder / "watched").exists()

    def pids(self) -> dict[int, int]:
        """The ranks that wait."""
        return {int(path.name[0]): int(path.read_text() or 0) for path in self.folder.glob("?-waits")}


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """A function that launches two ranks, given what each does; what is left is killed."""
    launched = []

    def launch(*ends: str) -> Launched:
        launched.append(Launched(tmp_path, "ranks", str(tmp_path), *ends))
        return launched[-1]

    yield launch
    for one in launched:
        for pid in one.pids().values():
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        one.process.kill()


def lives(pid: int) -> bool:
    """Whether the process runs a rank of ours."""
    try:
        return b"ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_clean_run_adds_no_word_and_hands_arguments_on(launch: Launch, tmp_path: Path):
    code = "os.write(1, os.environ['OMP_NUM_THREADS'].encode() + b'\\n')"  # in one piece: two ranks write
    launched = launch(code, code, "a $$ ${local_rank} b", "")
    assert launched.end() == 0
    assert launched.said == [] and launched.printed == "1\n1\n"
    assert (tmp_path / "1-arguments").read_text() == "\n".join([code, code, "a $$ ${local_rank} b", ""])
    assert list(launched.temporary.iterdir()) == []


NAMED = rf"rank 1 on {re.escape(socket.gethostname())} \(process \d+\)"
KILLED = rf"{NAMED} was ended by SIGKILL: if nobody sent it, the host ran out of memory"
FAILED = rf"(?s)Traceback .*\nValueError: unforeseen\n{NAMED} ended with exit code 1, as it says above"


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (("sys.exit(4)", "wait()"), 4, ""),  # whom the launcher ends
        (("after(1), sys.exit(1)", "wait(signal.SIGTERM, 3)"), 3, ""),
        (("wait(signal.SIGTERM, 1)", "after(0), sys.exit(2)"), 2, ""),
        (("sys.exit(143)", "sys.exit(143)"), 143, ""),
        (("sys.exit('words')", "wait()"), 1, "words"),
        (("wait()", "after(0), refuse('why')"), 2, "why"),  # rank 0, which the launcher ends, cannot say it
        (("wait()", "signal.raise_signal(signal.SIGKILL)"), 1, KILLED),
        (("wait()", "signal.raise_signal(signal.SIGBUS)"), 1, rf"(?s).*{NAMED} was ended by signal 7 \(Bus error\)"),
        (("wait()", "fail()"), 1, FAILED),
    ],
)
def test_exit_code_is_that_of_the_ranks(ends: tuple[str, str], code: int, said: str, launch: Launch):
    launched = launch(*ends)
    assert launched.end() == code
    assert re.fullmatch(said, "\n".join(launched.said)), launched.said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)]
)
def test_signal_reaches_the_ranks_and_gives_the_exit_code(
    number: signal.Signals, code: int, launch: Launch, tmp_path: Path
):
    """As SIGTERM, upon which they save; only SIGQUIT as itself, which would end them."""
    seen = number if number == signal.SIGQUIT else signal.SIGTERM
    launched = launch(*[f"wait({seen:d}, 143)"] * 2)
    launched.until(launched.all_wait)
    launched.process.send_signal(number)
    assert launched.end() == code
    assert launched.said == [] and len(list(tmp_path.glob("?-saved"))) == 2


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_signal_that_is_ignored_stays_ignored(before: signal.Handlers):
    """As `nohup` asks for; any other one is handled, and as before afterwards."""

    def handler(number: int, frame: object) -> None:
        pass

    old = signal.signal(signal.SIGHUP, before)
    try:
        with handling(handler):
            assert signal.getsignal(signal.SIGHUP) is (before if before is signal.SIG_IGN else handler)
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize(("work", "code"), [("impatient()", 143), ("wait(signal.SIGTERM, 0)", 0)])
def test_second_signal_does_not_cut_the_saving_short_and_one_after_the_last_step_is_no_failure(
    work: str, code: int, launch: Launch, tmp_path: Path
):
    launched = launch(work, work)
    launched.until(launched.all_wait)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == code
    assert len(list(tmp_path.glob("?-saved"))) == 2


def test_ranks_end_with_a_launcher_that_is_killed(launch: Launch, tmp_path: Path):
    launched = launch("wait(signal.SIGTERM, 143)", "wait()")
    launched.until(lambda: len(launched.pids()) == 2)
    pids = launched.pids().values()
    assert all(map(lives, pids))
    launched.process.kill()
    launched.end()
    until(lambda: not any(map(lives, pids)))
    assert (tmp_path / "0-saved").exists()


def test_rank_without_its_launcher_does_not_begin(tmp_path: Path):
    done = python("-m", "samebits.start.ranks", "1", tmp_path, "no_such_module")
    assert (done.returncode, done.stderr) == (143, "")


@pytest.mark.long
def test_sigterm_saves_the_training(tmp_path: Path, prepared: Path):
    out = tmp_path / "run"
    arguments = training(out, prepared, "tracking.enabled=false", "train.epochs=20")
    launched = Launched(tmp_path, "samebits", "train", *arguments)
    rows = out / "metrics.jsonl"
    launched.until(lambda: rows.is_file() and rows.read_bytes().count(b"\n") > 3)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 143
    (line,) = launched.said
    saved = [int(path.name[:9]) for path in checkpoint.found(out / "checkpoints")][-1]
    assert line.endswith("the same command goes on from there") and f"after step {saved};" in line
    # and one more step, where steps are quick, which the resumed run makes again
    assert len(rows.read_text().splitlines()) - saved in (0, 1)
    assert read_json(out / "run.json")["status"] == "KILLED"
