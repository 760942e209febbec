"""Trainings that the lab starts, in processes of their own, as a user would."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..address import PACKAGE, PROJECT
from ..errors import Failure


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """`--set` arguments for keys and their JSON-compatible values."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def command(
    module: str, settings: Mapping[str, Any], *arguments: str | Path, ranks: int = 1, package: str = PACKAGE.name
) -> list[str]:
    """The command line of a module of the package, under torchrun for more than one rank."""
    # by its own name torchrun would wait for ever where nothing resolves that, as in a container without network
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}", "-m"]
    launcher = torchrun if ranks > 1 else []
    return [sys.executable, "-m", *launcher, f"{package}{module}", *map(str, arguments), *overrides(settings)]


def environment(project: Path = PROJECT) -> dict[str, str]:
    """The variables of a process that runs the code of `project`, installed or not; its runs are no server's."""
    paths = [str(project / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


def start(words: Sequence[str], project: Path = PROJECT) -> "subprocess.Popen[bytes]":
    """Start a command in `project`, in a session of its own and silent."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        words, cwd=project, env=environment(project), stdout=quiet, stderr=quiet, start_new_session=True
    )


def run(words: Sequence[str], project: Path = PROJECT, ends: Sequence[int] = (0,)) -> str:
    """Run a command in `project` to its end, with one of these exit codes, and return what it printed.

    Raises:
        Failure: it failed; with the last lines that it said.
    """
    done = subprocess.run(words, cwd=project, env=environment(project), capture_output=True, text=True)
    if done.returncode not in ends:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-12:])
        raise Failure(f"{' '.join(words)}\nended with {done.returncode}:\n{said}")
    return done.stdout
