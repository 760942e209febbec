"""The `repro` command: `repro --help` lists the verbs."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from .errors import Failure
from .launch import PARAMS
from .settings import load

Folder = click.Path(file_okay=False, path_type=Path)
overriding = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of params.yaml; repeatable.",
)


class Plain(click.Group):
    """A group whose verbs end with a line or two and an exit code where the user's input is wrong."""

    def invoke(self, context: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(context)
        except Failure as failure:
            click.echo(str(failure), err=True)
            sys.exit(failure.exit_code)


@click.group(cls=Plain)
def main() -> None:
    """Records and proofs of this project's runs."""


@main.command()
@overriding
@click.pass_obj
def env(schema: Any, overrides: tuple[str, ...]) -> None:
    """Print the numeric environment that a run would have here."""
    from . import determinism

    settings = load(schema, PARAMS, overrides)
    determinism.set_environment(settings.determinism)
    determinism.apply(settings.determinism)

    from . import fingerprint  # imports torch, so only now
    from .world import device_of

    environment = fingerprint.numeric_environment(settings.determinism, device_of(settings.device))
    _print(fingerprint.record(environment, settings.compute))


@main.command()
@overriding
@click.pass_obj
def address(schema: Any, overrides: tuple[str, ...]) -> None:
    """Print the content address that a run would have, and what goes into it."""
    from . import manifest
    from .address import content_address

    settings = load(schema, PARAMS, overrides)
    prepared = manifest.read(Path(settings.data.prepared))
    _print(content_address(settings, prepared, int(os.environ.get("WORLD_SIZE", 1))).record())


@main.command()
@overriding
@click.pass_obj
def data(schema: Any, overrides: tuple[str, ...]) -> None:
    """Check the dataset file against its SHA-256 in params.yaml."""
    from . import manifest

    settings = load(schema, PARAMS, overrides)
    manifest.require_raw(Path(settings.data.raw), settings.data.sha256)


@main.command()
@click.argument("run", type=Folder, default="artifacts")
def sync(run: Path) -> None:
    """Upload to MLflow what it does not have yet of the run in directory RUN."""
    from . import tracking

    click.echo(tracking.sync(run)["where"])


@main.command()
@click.argument("run", type=Folder, default="artifacts")
def check(run: Path) -> None:
    """Say whether the run in directory RUN gave what results.lock and dvc.lock expect."""
    from .lab import results

    verdicts = results.check(run)
    for verdict in verdicts:
        click.echo(verdict.sentence)
    sys.exit(0 if all(verdict.holds for verdict in verdicts) else 1)


@main.command()
@click.argument("one", type=Folder)
@click.argument("other", type=Folder)
def diff(one: Path, other: Path) -> None:
    """Say where the runs in two directories part: step, phase, tensor; and what may have caused it."""
    from .lab import diff

    equal, lines = diff.report(diff.load(one), diff.load(other))
    click.echo("\n".join(lines))
    sys.exit(0 if equal else 1)


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
