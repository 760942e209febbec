"""How a stage starts and ends: arguments and environment before torch loads, plain words on failure."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from ..address import loaded
from ..base.output import outlive_readers
from ..base.project import Project, work_for
from ..config.params import load
from ..config.settings import Data, Section, Settings
from ..core.errors import RunError, UserError, of_system
from ..core.flags import require_held, set_environment, stated_variables
from ..core.seeds import derive, seed_everything
from ..guards import opened, stages

S = TypeVar("S", bound=Settings)

overriding = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of params.yaml; repeatable.",
)


out_option = click.option(
    "--out",
    default="artifacts",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The run directory.",
)
ranks_option = click.option(
    "--ranks",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Start so many ranks on this host; any number gives the same bits.",
)


def _parser(trains: bool) -> click.Command:
    """What reads the command line of a stage: overrides, the run directory, and of how many ranks a training is."""

    @click.command()
    @overriding
    @out_option
    def arguments(overrides: tuple[str, ...], out: Path, ranks: int = 1) -> tuple[tuple[str, ...], Path, int]:
        return overrides, out, ranks

    return ranks_option(arguments) if trains else arguments


def begin(project: Project, schema: type[S], trains: bool = False) -> tuple[S, Path]:
    """The checked config and the run directory that the command line asks for.

    On return the environment holds what torch and numpy read once, when they load. Where something was
    missing, this process has started itself again with it. A stage that `trains` may be asked for several ranks:
    then this process starts them, and ends with their exit code.
    """
    outlive_readers()
    try:
        parsed = _parser(trains).main(prog_name=f"python -m {_module()}", standalone_mode=False)
        if isinstance(parsed, int):  # --help was shown
            sys.exit(parsed)
        overrides, out, ranks = parsed
        work_for(project)
        loaded.require_own_library(project)
        loaded.remember(project)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of torchrun
            from .ranks import end_with_launcher

            end_with_launcher()
        config = load(schema, overrides=overrides)
        if ranks > 1:
            _start_ranks(config, overrides, out, ranks)
        set_environment(config.options.determinism)
        known = [project.root / name for name in (config.data.prepared, *config.unhashed.files)]
        opened.watch(project, [*known, Path(sys.prefix), *([] if trains else [out])], out if trains else None)
        return config, out
    except click.ClickException as error:
        _end(UserError(error.format_message()))
    except RunError as failure:
        _end(failure)


def _start_ranks(config: Settings, overrides: tuple[str, ...], out: Path, ranks: int) -> NoReturn:
    if "RANK" in os.environ:
        raise UserError(f"--ranks {ranks} given to a rank of torchrun; give torchrun --nproc-per-node {ranks} instead")
    if ranks > config.parallel.micro_batches:
        most = f"parallel.micro_batches={config.parallel.micro_batches}"
        raise UserError(f"--ranks {ranks} given, at most {most} wanted: each runs one")
    from .ranks import torchrun

    words = [*(word for override in overrides for word in ("--set", override)), "--out", str(out)]
    sys.exit(torchrun(_module(), words, ranks, stated_variables(config.options.determinism)))


def call(project: Project, stage: Callable[[Any, Path], None], config: Settings, out: Path, only: str = "") -> None:
    """Run a stage; a failure that a user can cause ends it with a line or two and an exit code, not a traceback.

    The stage is given the whole config, or `only` one of its sections: then no other key can change its outcome.
    All generators are seeded before it, so that a stage repeats that draws numbers outside a run.
    """
    try:
        sections = [only, "determinism"] if only else type(config).sections()  # `begin` has set its flags
        given = getattr(config, only) if only else config
        with _emptied(given), stages.watched(project, sections, whole=not only, unhashed=config.unhashed.modules):
            seed_everything(derive(0 if only else config.seed, "init"))
            stage(given, out)
            require_held()
    except RunError as failure:
        _end(failure)
    except OSError as error:
        if not (failed := of_system(error)):
            raise
        _end(failed)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _emptied(given: Section) -> AbstractContextManager[None]:
    """The folder of the prepared data begins empty where a stage is given the section `data` alone."""
    if not isinstance(given, Data):
        return nullcontext()
    from ..guards.emptied import prepared_anew

    return prepared_anew(Path(given.prepared))


def _end(failure: RunError) -> NoReturn:
    failure.report()
    sys.exit(failure.exit_code)


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else "stage"
