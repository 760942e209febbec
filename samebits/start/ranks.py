"""Several ranks on this host, started by torch's own elastic launcher; exit codes come from the ranks.

Plain torchrun ends with a traceback of its own and with exit code 1, whatever the ranks said. Here a rank that chose
its exit code has told why: nothing is added, and that code is returned. One that dies otherwise is named in a line.
SIGTERM, SIGHUP and Ctrl-C reach the ranks as SIGTERM, upon which they save their state; SIGQUIT ends them at once.

    python -m samebits.start.ranks LAUNCHER NOTES MODULE ARGUMENTS      what a rank runs; nobody types it
"""

import ctypes
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..base.loading import unsearched

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

GRACE = 100  # seconds in which ranks that are told to end may save their state; torch 2.11 gives them 30
STOPS = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
STOPPED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG = 1  # of prctl(2)


def torchrun(module: str, arguments: Sequence[str], ranks: int, environ: Mapping[str, str]) -> int:
    """Run `python -m module arguments` in so many ranks to their end, and return the exit code that they chose.

    The variables of `environ` are set in this process first, before torch loads. Call it in the main thread.
    """
    os.environ.update(environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it, which prints five lines about it
    with tempfile.TemporaryDirectory(prefix="ranks-") as notes:
        failures, stop = _launched([str(os.getpid()), notes, module, *arguments], ranks, notes)
        chosen = {int(note.name): int(note.read_text()) for note in Path(notes).iterdir() if note.is_file()}
    died = {
        rank: failure
        for rank, failure in sorted(failures.items())
        # the launcher ends those that are left by SIGTERM
        if failure.exitcode not in (chosen.get(rank), -signal.SIGTERM)
    }
    for rank, failure in died.items():
        _report(f"rank {rank} on {socket.gethostname()} {_end(failure)}")
    return exit_code([*chosen.values(), *(1 for _ in died)], whole=len(chosen) == ranks, stop=stop)


def _launched(words: Sequence[str], ranks: int, folder: str) -> tuple[Mapping[int, "ProcessFailure"], int | None]:
    """Start the ranks and wait for their end; the ranks that failed, and the signal that ended them all, if one did.

    In `folder` torch makes one for each rank.
    """
    with unsearched():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "LOGLEVEL" not in os.environ:  # which asks torch's launcher to speak
        log = logging.getLogger("torch.distributed.elastic")
        log.addHandler(logging.NullHandler())
        log.propagate = False
    grace: dict[str, Any] = {"shutdown_timeout": GRACE} if hasattr(LaunchConfig, "shutdown_timeout") else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=0,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # by the host's own name it would wait for ever where nothing resolves that
        logs_specs=DefaultLogsSpecs(log_dir=folder),  # else it leaves one in /tmp
        signals_to_handle="SIGQUIT",
        **grace,
    )
    stops: list[tuple[int, float]] = []  # signals, and when they came

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append((number, time.monotonic()))
        if len(stops) == 1:  # a later one must not cut the saving short
            raise SignalException(f"signal {number}", signal.SIGTERM)

    words = [word.replace("$", "$$") for word in words]  # `$` has a meaning for the launcher
    try:
        with handling(stop):
            elastic_launch(config, sys.executable)("-u", "-m", __name__, *words)
    except ChildFailedError as failed:
        return failed.failures, None
    except SignalException as signalled:
        number, since = [*stops, (signalled.sigval, time.monotonic())][0]
        seconds = getattr(config, "shutdown_timeout", 30)
        if time.monotonic() - since >= seconds:
            _report(f"ranks on {socket.gethostname()} were killed, for they had not ended {seconds} s after the signal")
        return {}, number
    return {}, None


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals] = STOPS
) -> Iterator[None]:
    """Have signals, by default those that end a training, call `handler`.

    One that this process ignores stays ignored: `nohup` asks for that.
    """
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def exit_code(codes: Sequence[int], whole: bool, stop: int | None = None) -> int:
    """One exit code from those of the ranks; `whole`: every rank has chosen one."""
    failed = sorted(set(codes) - {0, STOPPED})
    if failed:
        return next((code for code in failed if code != 1), 1)  # the others' 1 says that one of them is gone
    if whole and not any(codes):
        return 0  # also where the signal came too late
    return 128 + stop if stop else STOPPED


def _end(failure: "ProcessFailure") -> str:
    code = failure.exitcode
    if code == -signal.SIGKILL:
        return f"(process {failure.pid}) was ended by SIGKILL: if nobody sent it, the host ran out of memory"
    if code < 0:
        return f"(process {failure.pid}) was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"(process {failure.pid}) ended with exit code {code}, as it says above"


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def end_with_launcher() -> None:
    """Have this process get SIGTERM when the one that started it ends, however it ends.

    Ranks lead sessions of their own. Without this they train on, with the GPU's memory, when torchrun is killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # it outlasts the start of another program


def _rank(launcher: str, notes: str, module: str, *arguments: str) -> None:
    """Run a module, end when the launcher does, and note the exit code where the module chose one."""
    end_with_launcher()
    if os.getppid() != int(launcher):
        sys.exit(STOPPED)
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            _report(str(code))
            code = 1
    Path(notes, os.environ["RANK"]).write_text(str(code))
    sys.exit(code)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
