"""Stages that are started in processes of their own, as a user starts them. Analysis starts Python here alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..address import manifest
from ..address.pull import alone
from ..base.project import NAME, Project
from ..config.params import load
from ..config.settings import Settings
from ..core.errors import RunError
from ..core.flags import FLAGS
from ..guards.stages import VARIABLE as STAGE

if TYPE_CHECKING:
    from .warm import Forks

Started: TypeAlias = "subprocess.Popen[bytes]"  # what `start` gives
Process: TypeAlias = "subprocess.Popen[bytes] | Forks"  # a training that runs, and the group that it leads


class Ended(RunError):
    """A command ended with an exit code that nobody wanted.

    Attributes:
        code: the exit code.
        said: the last lines that it said.
    """

    def __init__(self, words: Sequence[str], code: int, said: Sequence[str]) -> None:
        super().__init__("\n".join([" ".join(words), f"ended with {code}:", *said]))
        self.code, self.said = code, said

    @property
    def last(self) -> str:
        """The last few of those lines."""
        return "\n".join(self.said[-LAST:])


# Trainings that are told to do more than train, by the module that a process runs in place of `train`. Its first
# arguments are that module's own; the others are those of `train`.
PERTURBED, AUDITED = "samebits.analysis.noise.perturbed", "samebits.analysis.audit.audited"
CONTROLLED, REPEATED = "samebits.analysis.controlled", "samebits.analysis.repeated"
WARM, SETTING = "samebits.start.warm", "samebits.prove.setting"  # fork trainings
PROVE = "SAMEBITS_PROVE"  # a variable: whether a training is to prove itself, as `prove.when`
UNPROVED = {PROVE: "never"}
LINES, LAST = 12, 6  # of what a failed command has said: all that are kept, and a few


def texts(settings: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` for keys and their JSON-compatible values."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def sets(overrides: Sequence[str]) -> list[str]:
    """`--set` arguments for texts KEY=VALUE."""
    return [word for text in overrides for word in ("--set", text)]


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """`--set` arguments for keys and their JSON-compatible values."""
    return sets(texts(settings))


def command(verb: str, settings: Mapping[str, Any], *arguments: str | Path, ranks: int = 1) -> list[str]:
    """The command line of a verb of `samebits`, under torchrun for more than one rank; or of a module of analysis."""
    # torchrun would wait for ever where nothing resolves the host's name, as in a container without network
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}", "-m"]
    launcher = torchrun if ranks > 1 else []
    name = [verb] if verb.startswith(f"{NAME}.") else [NAME, verb]
    return [sys.executable, "-m", *launcher, *name, *map(str, arguments), *overrides(settings)]


def environment(project: Project, flags: bool = True) -> dict[str, str]:
    """The variables of a process that runs the code of `project`, installed or not; no server and no stage of DVC.

    A training does not prove itself then: who starts it compares its bits.

    Without those of `flags`, a training sets them itself, and a relaxed one stays unset.
    """
    paths = [*project.path, *filter(None, [os.environ.get("PYTHONPATH")])]
    dropped = {"MLFLOW_TRACKING_URI", STAGE, *(each.name for each in FLAGS if each.setting and not flags)}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | UNPROVED | {"PYTHONPATH": os.pathsep.join(paths)}


def start(
    project: Project, words: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a command in `project`, in a session of its own; it writes what it prints to the end of `log`.

    `environ` holds other variables than those of `environment`.
    """
    environ = environment(project) if environ is None else environ
    with log.open("ab") as said:
        return subprocess.Popen(words, cwd=project.root, env=environ, stdout=said, stderr=said, start_new_session=True)


def piped(project: Project, words: Sequence[str], environ: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start a command in `project` that is asked by its standard input and answers by its output, line by line."""
    pipe = subprocess.PIPE
    # in a session of its own, where Ctrl-C does not reach it
    return subprocess.Popen(
        words, cwd=project.root, env=environ, stdin=pipe, stdout=pipe, text=True, start_new_session=True
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
        raise Ended(words, done.returncode, (done.stderr.strip() or done.stdout.strip()).splitlines()[-LINES:])
    return done.stdout


def shown(project: Project, words: Sequence[str]) -> int:
    """Run a command in `project` to its end, printing where this process does, and return its exit code."""
    return subprocess.run(words, cwd=project.root, env=environment(project)).returncode


def config_of(project: Project, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The config of a project as its own code reads it, which may be another release's.

    Returns:
        "config": the value of each key; "addressed": the part in the content address, as a tree; "environment": the
        keys that choose the numeric environment.

    Raises:
        Ended: it does not take these overrides.
    """
    found: dict[str, dict[str, Any]] = json.loads(run(project, [*command("config", {}), *sets(overrides)]))
    return found


def prepared(project: Project, config: Settings, report: Callable[[str], None]) -> dict[str, Any]:
    """The manifest of the prepared data, each byte of which is checked; missing ones are prepared first.

    Raises:
        UserError: they are altered; or overrides ask for other ones than were prepared.
        Ended: they could not be prepared.
    """
    prepare_missing(project, config, report)
    return manifest.require_prepared(config.data)


def prepare_missing(project: Project, config: Settings, report: Callable[[str], None]) -> None:
    """Run the stage that prepares the data, where these are not there as params.yaml asks.

    Raises:
        UserError: overrides ask for other ones than were prepared; or the dataset is not there.
        Ended: they could not be prepared.
    """
    with suppress(manifest.Unprepared):
        manifest.require_requested(config.data)
        return
    with alone(project.root, "prepare"):  # by then another process may have done it
        try:
            manifest.require_requested(config.data)
        except manifest.Unprepared as unprepared:
            if config.data != load(type(config)).data:
                raise
            report(f"{str(unprepared).partition('. ')[0]}. Preparing the data")
            manifest.require_raw(config.data)  # it says where DVC brings them
            run(project, command("prepare", {}))
