"""Trainings that begin with torch loaded: forks of one process that has imported it.

To import torch takes longer than a short training. A fork runs a module as `python -m` does, with arguments of its
own. It imports all code of the project anew; of the libraries it has those that the library imports.

    python -m samebits.start.warm      forks as the lines on its standard input ask for; nobody types it
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from ..base import loading
from ..base.project import NAME, Project
from ..core.errors import RunError
from . import trainings
from .ranks import GRACE, STOPPED, end_with_launcher, exit_code

PAUSE = 0.01  # seconds between two looks at processes that run


class Warm:
    """A process with the variables `environ` that has torch loaded.

    Leaving ends it, and with it the forks that still run.
    """

    def __init__(self, project: Project, environ: Mapping[str, str], words: Sequence[str] = ()) -> None:
        """`words` are those of a module that calls `serve`; without them, it is this one."""
        self._project, self._environ = project, environ
        self._words = words or trainings.command(trainings.WARM, {})

    def __enter__(self) -> Self:
        # forks end as soon as this process does
        self._server = trainings.piped(self._project, self._words, self._environ)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.kill()
        self._server.communicate()
        self._folder.cleanup()

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self._server.poll() is None

    def start(self, module: str, arguments: Sequence[str], log: Path, ranks: int = 1) -> "Forks":
        """Run `python -m module arguments` in so many ranks, which write what they print to the end of `log`."""
        notes = tempfile.mkdtemp(dir=self._folder.name)
        return Forks(self, self.ask("start", [module, *arguments], str(log), ranks, notes))

    def ask(self, verb: str, *given: Any) -> Any:
        """What the process answers.

        Raises:
            RunError: it has ended.
        """
        assert self._server.stdin and self._server.stdout
        try:
            print(json.dumps([verb, *given]), file=self._server.stdin, flush=True)
            return json.loads(self._server.stdout.readline())
        except (OSError, ValueError):
            raise RunError(f"the process that loads torch ended with {self._server.wait()}: see above") from None


class Forks:
    """The ranks of a training, with what subprocess.Popen offers for one process.

    Attributes:
        pid: of the first rank, and of the process group that all are in.
    """

    def __init__(self, warm: Warm, pids: Sequence[int]) -> None:
        self._warm, self.pid = warm, pids[0]
        self._codes: dict[int, int | None] = dict.fromkeys(pids)
        self._until = 0.0  # how long ranks may save their state once another one has failed

    def poll(self) -> int | None:
        """The exit code that the ranks chose; None while one runs. One that fails ends the others, as torchrun does."""
        for pid in self._running():
            code = self._warm.ask("poll", pid)
            self._codes[pid] = STOPPED if code == -signal.SIGTERM else code  # it had not yet begun to heed it
        codes = [code for code in self._codes.values() if code is not None]
        if not self._running():
            return exit_code(codes, whole=True)
        if any(codes) and not self._until:
            self._until = time.monotonic() + GRACE
            self._signal(signal.SIGTERM)
        elif self._until and time.monotonic() > self._until:
            self._signal(signal.SIGKILL)
        return None

    def wait(self) -> int:
        """The exit code that the ranks chose, once all have ended."""
        while (code := self.poll()) is None:
            time.sleep(PAUSE)
        return code

    def _running(self) -> list[int]:
        return [pid for pid, code in self._codes.items() if code is None]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


# ---- in the process that has torch loaded


def load() -> None:
    """Load torch, and all that trainings load. A fork copies no memory when it looks for garbage."""
    loading.load(*loading.TRAINING)


def serve() -> None:
    """Fork trainings as the lines on standard input ask for, until that ends."""
    for line in sys.stdin:
        verb, *given = json.loads(line)
        print(json.dumps(_start(*given) if verb == "start" else _poll(*given)), flush=True)


def _start(words: list[str], log: str, ranks: int, notes: str) -> list[int]:
    """Fork the ranks of a training, which share the folder `notes`; the numbers of their processes."""
    pids: list[int] = []
    meeting: dict[str, str] = {}
    for rank in range(ranks):
        place: dict[str, Any] = {}
        if ranks > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place["TORCHELASTIC_ERROR_FILE"] = f"{notes}/{rank}/error.json"  # as torchrun has it
        read, reports = os.pipe()
        pid = os.fork()
        if not pid:
            _become(words, log, {name: str(value) for name, value in place.items()}, meeting, pids[:1], reports)
        os.close(reports)
        with os.fdopen(read) as said:
            meeting = json.load(said)
        pids.append(pid)
    return pids


def _poll(pid: int) -> int | None:
    """The exit code of a fork; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(
    words: list[str], log: str, place: dict[str, str], meeting: dict[str, str], first: list[int], reports: int
) -> NoReturn:
    """Run a module in this fork, as `python -m` would; say in `reports` by which variables ranks meet."""
    end_with_launcher()
    os.setpgid(0, *first or [0])
    for target, file in enumerate((os.devnull, log, log)):  # standard input, output and error: now, for a store warns
        opened = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    if place and not meeting:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # the first rank holds the port from here on, so nobody else can take it
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    os.environ.update(place | meeting)
    with os.fdopen(reports, "w") as said:
        json.dump(meeting, said)
    ours = words[0].partition(".")[0], NAME, "__mp_main__"  # which is multiprocessing's name for this file
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    importlib.invalidate_caches()  # of what lay in the project's folders
    sys.argv, sys.orig_argv = words, [sys.executable, "-m", *words]
    os._exit(_ran(words[0]))  # an interpreter that ends touches all the memory that a fork shares, and so copies it


def _ran(module: str) -> int:
    """Run a module as `python -m` does, and what a process does at its end; its exit code."""
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # both as multiprocessing ends its forks
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    load()
    serve()
