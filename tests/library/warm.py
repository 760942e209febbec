"""Processes that have torch loaded when they begin: forked from one that imported it, in place of started.

Importing torch takes most of the time of a short training, and the tests start some hundred processes. What runs in
them is the same. The tests whose subject is the start itself (its environment, its command line, torchrun) start cold,
as a user does. Ranks are not forked from an agent such as torchrun's: it has threads, whose locks a fork would copy.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

if not os.environ.get("REPRO_PROJECT"):
    print("REPRO_PROJECT is not set: name the folder of a generated project", file=sys.stderr)
    sys.exit(2)
PROJECT = Path(os.environ["REPRO_PROJECT"]).resolve()
(PACKAGE,) = [path.parent.name for path in (PROJECT / "src").glob("*/train.py")]

FORKS = multiprocessing.get_context("forkserver")  # no threads and no connections of this process
FORKS.set_forkserver_preload(["torch._dynamo", "mlflow", "samebits.run", "samebits.core.sampling"])


TEMPLATE = Path(__file__).resolve().parents[2]
PATIENCE = 900  # seconds, for what takes a few: the machine may be busy
GRACE = 60  # seconds in which ranks that fail alike end by themselves, on a busy machine too


class Warm:
    """`python -m samebits train ARGUMENTS`, with what subprocess.Popen offers; with `ranks`, that many of them.

    What they print is appended to `out` and `err`. With `script`, this file runs in place of the training. As under
    torchrun, a rank that fails ends the others by SIGTERM (after `grace` seconds), and then the exit code is 1.
    """

    def __init__(
        self,
        *arguments: str,
        out: Path,
        err: Path,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        script: Path | None = None,
        grace: float = GRACE,
    ) -> None:
        body = (_script, str(script), arguments) if script else (_module, "samebits", ("train", *arguments))
        self._failed, self._grace = 0.0, grace  # when the first one did
        self._ranks = ranks
        self._processes = []
        port = _free_port()
        for rank in range(ranks or 1):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = {name: str(value) for name, value in (place | meeting).items()} if ranks else {}
            variables = os.environ | dict(env or {}) | own
            process = FORKS.Process(target=_enter, args=(variables, (str(out), str(err)), *body))
            process.start()
            self._processes.append(process)
        assert self._processes[0].pid
        self.pid = self._processes[0].pid

    def poll(self) -> int | None:
        """The exit code, or None while one of them runs."""
        codes = [process.exitcode for process in self._processes]
        if any(codes) and None in codes:
            self._failed = self._failed or time.monotonic()
            if time.monotonic() > self._failed + self._grace:
                self.send_signal(signal.SIGTERM)
        if None in codes:
            return None
        return int(any(codes)) if self._ranks else codes[0]

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for the end and return the exit code."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"still running after {seconds} s"
            wait([process.sentinel for process in self._processes if process.exitcode is None], 1)
        return code

    def send_signal(self, number: signal.Signals, group: bool = False) -> None:
        """Send a signal to those that have not ended; with `group`, to the processes of each, too."""
        for process in self._processes:
            if process.exitcode is None and process.pid:
                (os.killpg if group else os.kill)(process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the processes themselves."""
        self.send_signal(signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- in the forked process


def _enter(variables: dict[str, str], files: tuple[str, str], work: Callable[..., None], *arguments: Any) -> None:
    """Take on what a process is started with, then work."""
    gc.freeze()  # else a look for garbage would copy all memory that this process shares with its parent
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGQUIT):  # which `nohup`, or a shell's job in the background, ignores
        signal.signal(number, signal.SIG_DFL)
    multiprocessing.set_start_method(None, force=True)  # the platform's own, for loader workers
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(PROJECT)
    forget_tests()
    for descriptor, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    work(*arguments)


def forget_tests() -> None:
    """Forget the modules of the tests and tools that start trainings: a stage refuses modules from elsewhere."""
    folders = tuple(f"{TEMPLATE / folder}/" for folder in ("tests", "tools"))
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folders):
            del sys.modules[name]


def _module(name: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
