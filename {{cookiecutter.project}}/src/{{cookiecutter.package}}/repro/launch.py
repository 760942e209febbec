"""How a stage starts and ends: arguments and environment before torch loads, plain words on failure."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import click

from .determinism import set_environment
from .errors import Failure, Refused
from .settings import Settings, load

PARAMS = Path("params.yaml")
S = TypeVar("S", bound=Settings)


@click.command()
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of params.yaml; repeatable.",
)
@click.option(
    "--out",
    default="artifacts",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The run directory.",
)
def _arguments(overrides: tuple[str, ...], out: Path) -> tuple[tuple[str, ...], Path]:
    return overrides, out


def begin(schema: type[S]) -> tuple[S, Path]:
    """The checked config and the run directory that the command line asks for.

    On return the environment holds what torch and numpy read once, when they load. Where something was
    missing, this process has started itself again with it.
    """
    try:
        parsed = _arguments.main(prog_name=f"python -m {_module()}", standalone_mode=False)
        if isinstance(parsed, int):  # --help was shown
            sys.exit(parsed)
        overrides, out = parsed
        config = load(schema, PARAMS, overrides)
        set_environment(config.determinism)
        return config, out
    except click.ClickException as error:
        _end(Refused(error.format_message()))
    except Failure as failure:
        _end(failure)


def call(stage: Callable[[S, Path], None], config: S, out: Path) -> None:
    """Run a stage; what a user can cause ends it with a line or two and an exit code, not a traceback."""
    try:
        stage(config, out)
    except Failure as failure:
        _end(failure)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _end(Failure(f"{error}: free some space and run the same command again, it goes on from its last checkpoint"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _end(failure: Failure) -> NoReturn:
    failure.tell()
    sys.exit(failure.exit_code)


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else "stage"
