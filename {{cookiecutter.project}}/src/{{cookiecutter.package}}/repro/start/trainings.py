"""Trainings that the lab starts, in processes of their own, as a user does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..address import manifest
from ..base.project import Project
from ..config.params import load
from ..config.settings import Settings
from ..core.errors import Failure
from ..guards.stages import VARIABLE as STAGE


class Process(Protocol):
    """A training that runs, as subprocess.Popen or `warm` has started it."""

    @property
    def pid(self) -> int:
        """The number of its process, and of the group that its processes are in."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self) -> int:
        """Its exit code, once it has ended."""


class Ended(Failure):
    """A command ended with an exit code that nobody wanted.

    Attributes:
        code: the exit code.
        said: the last lines that it said.
    """

    def __init__(self, words: Sequence[str], code: int, said: Sequence[str]) -> None:
        super().__init__("\n".join([" ".join(words), f"ended with {code}:", *said]))
        self.code, self.said = code, said


def texts(settings: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` for keys and their JSON-compatible values."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """`--set` arguments for keys and their JSON-compatible values."""
    return [word for text in texts(settings) for word in ("--set", text)]


def command(
    project: Project, module: str, settings: Mapping[str, Any], *arguments: str | Path, ranks: int = 1
) -> list[str]:
    """The command line of a module of the project's package, under torchrun for more than one rank."""
    # torchrun would wait for ever where nothing resolves the host's name, as in a container without network
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}", "-m"]
    launcher = torchrun if ranks > 1 else []
    return [sys.executable, "-m", *launcher, f"{project.name}{module}", *map(str, arguments), *overrides(settings)]


def environment(project: Project) -> dict[str, str]:
    """The variables of a process that runs the code of `project`, installed or not; no server and no stage of DVC."""
    paths = [str(project.root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name not in ("MLFLOW_TRACKING_URI", STAGE)}
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


def start(project: Project, words: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command in `project`, in a session of its own; it writes what it prints to the end of `log`."""
    with log.open("ab") as said:
        return subprocess.Popen(
            words, cwd=project.root, env=environment(project), stdout=said, stderr=said, start_new_session=True
        )


def run(
    project: Project, words: Sequence[str], ends: Sequence[int] = (0,), environ: Mapping[str, str] | None = None
) -> str:
    """Run a command in `project` to its end, with one of these exit codes, and return what it printed.

    `environ` holds other variables than those of `environment`.

    Raises:
        Ended: it failed.
    """
    environ = environment(project) if environ is None else environ
    done = subprocess.run(words, cwd=project.root, env=environ, capture_output=True, text=True, errors="replace")
    if done.returncode not in ends:
        raise Ended(words, done.returncode, (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:])
    return done.stdout


def prepared(project: Project, config: Settings, tell: Callable[[str], None]) -> dict[str, Any]:
    """The manifest of the prepared data; where these are not as params.yaml asks, its stage prepares them first.

    Raises:
        Refused: they are altered; or overrides ask for other ones than were prepared.
        Ended: they could not be prepared.
    """
    try:
        return manifest.require_prepared(config.data)
    except manifest.Unprepared as unprepared:
        if config.data != load(type(config)).data:
            raise
        tell(f"{str(unprepared).partition('. ')[0]}. Preparing the data")
        manifest.require_raw(config.data)  # it says where DVC brings them
        run(project, command(project, ".prepare", {}))
        return manifest.require_prepared(config.data)
