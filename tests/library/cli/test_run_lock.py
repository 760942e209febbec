"""One training per run directory: the living keep it, and nothing that the dead leave keeps anybody out for good."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from samebits.core.errors import RunError, UserError
from samebits.record import holder as holder_module
from samebits.record import lock, waiting
from samebits.record.holder import Holder
from samebits.record.lock import LOCK, RunLock

HOLD = """
import os, sys
from pathlib import Path
from samebits.core.errors import RunError
from samebits.record.lock import RunLock

assert "torch" not in sys.modules
folder, what = sys.argv[1:]
lock = RunLock(Path(folder))
try:
    lock.acquire()
    child = os.fork() if what == "fork" else None
    if child != 0:
        print("held", child, flush=True)
    sys.stdin.read()
    lock.release()
except RunError as failure:
    print(failure, file=sys.stderr)
    sys.exit(failure.exit_code)
"""
LOCKING = """
import fcntl, sys

file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

Start = Callable[..., "subprocess.Popen[str]"]
Left = Callable[..., Path]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a process which takes the run directory and keeps it; what is left is killed."""
    started = []

    def begin(what: str = "", code: str = HOLD, path: Path = tmp_path / "run") -> "subprocess.Popen[str]":
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen([sys.executable, "-c", code, str(path), what], text=True, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def refused_to(process: "subprocess.Popen[str]") -> str:
    """The one line by which it is refused."""
    assert process.wait() == 2 and process.stderr
    (line,) = process.stderr.read().splitlines()
    return line


def held(process: "subprocess.Popen[str]") -> bool:
    """Whether it got the folder."""
    assert process.stdout
    return process.stdout.readline().startswith("held")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run directory."""
    return tmp_path / "run"


@pytest.fixture
def left(run: Path) -> Left:
    """A function that leaves a lock file, as by some other process, with its last sign of life so many seconds ago."""

    def left(seconds: float = 0, content: bytes | None = None, **facts: Any) -> Path:
        run.mkdir(exist_ok=True)
        stranger = replace(Holder.this(), host="node7", machine="another", pid=4711, begun="yesterday")
        (run / LOCK).write_bytes(replace(stranger, **facts).content() if content is None else content)
        moment = time.time() - seconds
        os.utime(run / LOCK, (moment, moment))
        return run / LOCK

    return left


def refusal(folder: Path) -> str:
    """The one line by which the folder is refused."""
    with pytest.raises(UserError) as refused:
        RunLock(folder).acquire()
    (line,) = str(refused.value).splitlines()
    return line


@contextmanager
def holding(folder: Path) -> Iterator[RunLock]:
    """This process holds the folder."""
    mine = RunLock(folder)
    mine.acquire()
    try:
        yield mine
    finally:
        mine.release()


def require_free(folder: Path) -> None:
    """This process gets it, and gives it back."""
    with holding(folder) as mine:
        mine.require()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks looks again soon."""
    monkeypatch.setattr(lock, "LOOK", 0.01)
    monkeypatch.setattr(lock, "CONFIRM", 0.01)


def unable(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    """Have this process's file system unable to lock."""

    def lockf(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)


# ---- those that live


def test_second_training_is_refused_naming_host_and_process(begin: Start, run: Path):
    first = begin()
    assert held(first)
    before = (run / LOCK).read_bytes()
    line = refused_to(begin())
    assert line.startswith(
        f"{run}: another training writes there: process {first.pid} on {socket.gethostname()}, since"
    )
    assert line.endswith("Wait for it, end it, or choose another folder with --out")
    assert (run / LOCK).read_bytes() == before and first.poll() is None


def test_of_many_that_start_at_once_over_a_left_lock_one_gets_the_folder(begin: Start, left: Left):
    for facts in ({"machine": Holder.this().machine, "pid": 2**22 + 1}, {"seconds": 1000.0}):  # here, elsewhere
        left(**facts)
        starts = [begin() for _ in range(5)]
        assert [held(process) for process in starts].count(True) == 1
        for process in starts:
            process.communicate()
        assert sorted(process.returncode for process in starts) == [0, 2, 2, 2, 2]


def test_stopped_holder_keeps_the_folder(begin: Start, run: Path):
    holder = begin()
    assert held(holder)
    holder.send_signal(signal.SIGSTOP)
    assert f"process {holder.pid} " in refusal(run)


def test_same_process_is_refused_too_and_loses_nothing_by_asking(begin: Start, run: Path):
    with holding(run):
        assert "this very process" in refusal(run)
        assert begin().wait() == 2
    require_free(run)


def test_holder_that_lost_the_kernels_lock_still_has_the_folder(begin: Start, run: Path):
    """As by a library that opens and closes every file of the folder."""
    with holding(run):
        (run / LOCK).read_bytes()
        assert f"process {os.getpid()} " in refused_to(begin())


# ---- what the dead leave


def test_folder_given_back_is_free_and_as_it_was(begin: Start, run: Path):
    with holding(run) as held_here:
        held_here.require()
        assert [path.name for path in run.iterdir()] == [LOCK]
    assert list(run.iterdir()) == []
    assert held(begin())


def test_killed_holder_leaves_the_folder_free_at_once(begin: Start, run: Path):
    for _ in range(3):
        holder = begin()
        assert held(holder)
        holder.kill()  # and nobody waits for its end
    require_free(run)


def test_fork_that_outlives_the_holder_does_not_keep_the_folder(begin: Start, run: Path):
    holder = begin("fork")
    assert holder.stdout
    fork = int(holder.stdout.readline().split()[1])
    holder.kill()
    holder.wait()
    os.kill(fork, 0)  # it lives
    require_free(run)
    os.kill(fork, signal.SIGKILL)


def test_fork_gives_nothing_back(run: Path, begin: Start):
    with holding(run) as mine:
        if not (child := os.fork()):
            mine.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        mine.require()
        assert begin().wait() == 2


@pytest.mark.parametrize(
    "content", [b"", b'{"host": "no', b"\xff\x00", b"[]", b"7", b'{"pid": 1}', b"[" * 5000, b"x" * 5000]
)
def test_torn_empty_or_foreign_lock_file_keeps_nobody_out(content: bytes, left: Left, run: Path):
    left(content=content)
    require_free(run)


def test_file_of_the_right_keys_with_wrong_values_names_nobody():
    right = asdict(Holder.this())
    assert Holder.named(json.dumps(right).encode())
    assert not Holder.named(json.dumps(right | {"pid": "1"}).encode())


@pytest.mark.parametrize("cannot", [False, True])
def test_process_that_is_gone_keeps_nobody_out(cannot: bool, left: Left, run: Path, monkeypatch: pytest.MonkeyPatch):
    """Its number is free, or another process has it by now."""
    if cannot:
        unable(monkeypatch)
    for pid in (2**22 + 1, os.getppid()):
        left(machine=Holder.this().machine, pid=pid, started="1")
        require_free(run)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("cannot", [False, True])
def test_process_that_ends_is_waited_for(cannot: bool, begin: Start, run: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed, it may hold its files for a while: it is asked for once more."""
    holder, states = begin(), iter([holder_module.ENDS, holder_module.ENDS])
    assert held(holder)

    def state(self: Holder) -> str:
        message = next(states, holder_module.GONE)
        if message == holder_module.GONE:
            holder.kill()
            holder.wait()
        return message

    monkeypatch.setattr(Holder, "state", state)
    if cannot:
        unable(monkeypatch)
    with holding(run):
        assert next(states, None) is None


# ---- holders out of sight: on another machine, or in another container where nothing can lock


def test_holder_elsewhere_without_a_sign_of_life_is_taken_over_in_one_line(
    left: Left, run: Path, capsys: pytest.CaptureFixture[str]
):
    left(seconds=waiting.SILENT + 1)
    with holding(run):
        (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"{run}: taken over from process 4711 on node7, since yesterday, which gave no sign of life for 120 s"
    )


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("ahead", [0, 10**6])
def test_holder_elsewhere_that_was_just_there_is_waited_for(
    ahead: float, left: Left, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Also where its clock was far ahead."""
    left(seconds=-ahead)
    monkeypatch.setattr(waiting, "SILENT", 1.0)
    began = time.monotonic()
    with holding(run):
        assert time.monotonic() - began >= 0.9
    patient, taken = capsys.readouterr().err.splitlines()
    assert "process 4711 on node7" in patient and "waiting up to 1 s for a sign of life" in patient
    assert "taken over" in taken


def test_holder_elsewhere_that_gives_a_sign_of_life_keeps_the_folder(
    left: Left, run: Path, monkeypatch: pytest.MonkeyPatch
):
    path, looks = left(seconds=60), []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            os.utime(path)

    monkeypatch.setattr(lock.time, "sleep", sleep)
    before = path.read_bytes()
    assert "process 4711 on node7" in refusal(run)
    assert len(looks) == 3 and path.read_bytes() == before


def test_holder_gives_signs_of_life(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "EVERY", 0.01)
    with holding(run):
        for _ in range(2):
            os.utime(run / LOCK, (0, 0))
            while (run / LOCK).stat().st_mtime == 0:
                time.sleep(0.01)


@pytest.mark.usefixtures("quick")
def test_lock_that_a_lost_machine_holds_is_replaced(
    left: Left, begin: Start, run: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a file server does that never learns of the end of a machine. An old sign alone is no reason."""
    path = left(seconds=1000)
    assert held(begin(code=LOCKING, path=path))
    monkeypatch.setattr(waiting, "SILENT", 0.5)
    began, inode = time.monotonic(), path.stat().st_ino
    with holding(run) as mine:
        assert time.monotonic() - began >= 0.5
        assert path.stat().st_ino != inode
        mine.require()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_nothing_can_lock_processes_and_signs_decide(
    number: int, left: Left, run: Path, monkeypatch: pytest.MonkeyPatch, begin: Start
):
    unable(monkeypatch, number)
    require_free(run)
    holder = begin()
    assert held(holder)
    assert f"process {holder.pid} " in refusal(run)
    holder.kill()
    require_free(run)
    left(seconds=waiting.SILENT + 1, machine=Holder.this().machine, namespace="another container")
    require_free(run)


def test_of_two_that_cannot_lock_the_last_writer_has_the_folder(
    left: Left, run: Path, begin: Start, monkeypatch: pytest.MonkeyPatch
):
    other = begin(path=run.with_name("elsewhere"))
    assert held(other)

    def sleep(seconds: float) -> None:
        (run / LOCK).write_bytes((run.with_name("elsewhere") / LOCK).read_bytes())

    unable(monkeypatch)
    monkeypatch.setattr(lock.time, "sleep", sleep)
    assert f"process {other.pid} " in refusal(run)


# ---- folders that are none, or change


def test_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path):
    file, *folders = (tmp_path / name for name in ("file", "folder", "link", "pipe"))
    file.touch()
    for folder, plant in zip(
        folders, (Path.mkdir, lambda path: path.symlink_to(tmp_path / "outside"), os.mkfifo), strict=True
    ):
        folder.mkdir()
        plant(folder / LOCK)
    for folder in (file, *folders, Path("/sys/kernel")):
        line = refusal(folder)
        assert line.startswith(f"{folder / LOCK}: ") and line.endswith("choose another with --out")
    assert not (tmp_path / "outside").exists()


def test_full_disk_is_told_as_one(run: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "pwrite", full)
        RunLock(run).acquire()
    require_free(run)


@pytest.mark.usefixtures("quick")
def test_folder_replaced_while_it_is_taken_is_taken_anew(run: Path, monkeypatch: pytest.MonkeyPatch):
    lockf, calls = fcntl.lockf, []

    def replacing(*arguments: Any) -> None:
        if not calls:
            run.rename(run.with_name("old"))
            run.mkdir()
        calls.append(arguments)
        lockf(*arguments)

    monkeypatch.setattr(fcntl, "lockf", replacing)
    require_free(run)
    assert len(calls) == 2


def moved(run: Path) -> None:
    """The folder has another name."""
    run.rename(run.with_name("moved"))


def replaced(run: Path) -> None:
    """Another training has a folder of that name."""
    moved(run)
    run.mkdir()
    (run / LOCK).write_bytes(replace(Holder.this(), pid=4711).content())


def overwritten(run: Path) -> None:
    """Another machine has the file."""
    (run / LOCK).write_bytes(replace(Holder.this(), machine="another").content())


@pytest.mark.parametrize("lose", [moved, replaced, overwritten])
def test_folder_that_is_lost_is_written_no_more_and_left_to_its_owner(lose: Callable[[Path], None], run: Path):
    with holding(run) as mine:
        mine.require()
        lose(run)
        with pytest.raises(RunError, match="no longer this training's") as failure:
            mine.require()
        assert failure.value.exit_code == 1
    assert (run / LOCK).exists() == (lose is not moved)
