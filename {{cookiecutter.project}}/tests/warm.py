"""Processes that have torch loaded when they begin: forked from one that imported it, in place of started.

Importing torch takes most of the time of a short training, and the tests start some eighty processes. What runs in
them is the same, and so is the agent above the ranks, torchrun's own. The tests whose subject is the start itself
(its environment, its command line, torchrun's restarts) start cold, as a user does.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
(PACKAGE,) = [path.parent.name for path in (PROJECT / "src").glob("*/repro")]
OURS = [f"{PACKAGE}.{module}" for module in ("config", "data", "evaluate", "model", "repro.run", "repro.sampling")]

FORKS = multiprocessing.get_context("forkserver")  # no threads and no connections of this process
FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed.run", "mlflow", *OURS])


class Warm:
    """`python -m <package>.train ARGUMENTS`, with what subprocess.Popen offers; several ranks come under an agent.

    What it prints is appended to `out` and `err`. With `script`, this file runs in place of the training.
    """

    def __init__(
        self,
        *arguments: str,
        out: Path,
        err: Path,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        script: Path | None = None,
    ) -> None:
        body = (_script, str(script), arguments) if script else (_module, f"{PACKAGE}.train", arguments)
        variables, files = os.environ | dict(env or {}), (str(out), str(err))
        work: tuple[Any, ...] = (_under_an_agent, ranks, *body) if ranks else body
        self._process = FORKS.Process(target=_enter, args=(variables, files, *work))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still running after {seconds} s"
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to this process alone."""
        self.send_signal(signal.SIGKILL)


# ---- in the forked process


def _enter(variables: dict[str, str], files: tuple[str, str], work: Callable[..., None], *arguments: Any) -> None:
    """Take on what a process is started with, then work."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(PROJECT)
    for descriptor, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    work(*arguments)


def _module(name: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _under_an_agent(ranks: int, *work: Any) -> None:
    """What torchrun does, with forked ranks."""
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    record(elastic_launch(config, work[0]))(*work[1:])
