"""The `samebits` command: `samebits --help` lists the verbs, grouped by what a person wants."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from . import __version__, front
from .base.output import outlive_readers
from .base.project import NAME
from .config.params import load
from .core.errors import RunError, of_system
from .front import Ours, overriding

Folder = click.Path(file_okay=False, path_type=Path)

# What a person wants -> the verbs that do it, in the order of `samebits --help`.
GROUPS = {
    "Train": ("prepare", "train", "evaluate", "sweep"),
    "Ask": ("docs", "config", "address", "env", "diff"),
    "Prove": ("doctor", "smoke", "hash-data", "check-data", "check", "verify", "verify-receipt"),
    "Measure": ("audit", "bisect", "compare", "cost", "noise", "trial"),
    "Hand on": ("accept", "bundle", "replay", "report", "sync", "upgrade"),
}


# Of each verb, words with which it is called; `samebits VERB --help` shows them.
EXAMPLES = {
    "prepare": "",
    "train": "--ranks 4 --from artifacts --set train.epochs=5 --out artifacts-longer",
    "evaluate": "--out artifacts-short",
    "sweep": "train.learning_rate=0.002,0.004 seed=0..4 --jobs 2",
    "docs": "resume",
    "config": "--set seed=1",
    "address": "--set seed=1",
    "env": "",
    "diff": "artifacts artifacts-short",
    "doctor": "",
    "smoke": "",
    "hash-data": "--files",
    "check-data": "",
    "check": "artifacts",
    "verify": "--only '2 ranks' --only 'killed and resumed'",
    "verify-receipt": "artifacts/receipt.json",
    "audit": "--set model.name=transformer",
    "bisect": "artifacts artifacts-other",
    "compare": "artifacts-a* -- artifacts-b*",
    "cost": "--cycles 5",
    "noise": "--runs 5 --short",
    "trial": "loader.workers=4 --pairs 5",
    "accept": "artifacts --source 'the first run on our data'",
    "bundle": "artifacts --out bundle.tar.gz",
    "replay": "artifacts/receipt.json --ranks 2",
    "report": "artifacts artifacts-short --out report.html",
    "sync": "artifacts",
    "upgrade": "../repro-template@main",
}


class Grouped(click.Group):
    """Verbs in groups, each with its whole line; a failure that a user can cause ends in a line and an exit code."""

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        """Read what stands before the verb."""
        try:
            return super().make_context(*given, **more)
        except click.UsageError as error:
            _refuse(error)

    def invoke(self, context: click.Context) -> Any:
        """Run the verb."""
        outlive_readers()
        context.obj = context.obj or Ours()
        try:
            return super().invoke(context)
        except click.UsageError as error:
            _refuse(error)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)
        except (RunError, OSError) as error:
            failure = of_system(error) if isinstance(error, OSError) else error
            if not failure:
                raise
            click.echo(str(failure), err=True)
            sys.exit(failure.exit_code)

    def list_commands(self, context: click.Context) -> list[str]:
        """The names of all verbs."""
        return [verb for verbs in GROUPS.values() for verb in verbs]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The verb of this name. Those of analysis are loaded on request: `samebits train` loads none."""
        found = super().get_command(context, name)
        if not found:
            from .analysis.verbs import VERBS

            found = VERBS.get(name)
        if found and name in EXAMPLES:
            found.epilog = f"Example: {' '.join([NAME, name, EXAMPLES[name]]).strip()}"
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List every verb with the first line of its help, uncut."""
        found = {verb: self.get_command(context, verb) for verb in self.list_commands(context)}
        helped = {verb: command.get_short_help_str(limit=200) for verb, command in found.items() if command}
        width = max(map(len, helped))  # so that all groups have their lines in one column
        for title, verbs in GROUPS.items():
            rows = [(verb.ljust(width), helped[verb]) for verb in verbs]
            with formatter.section(title):
                formatter.write_dl(rows)


def _refuse(error: click.UsageError) -> NoReturn:
    click.echo(error.format_message(), err=True)
    sys.exit(error.exit_code)


@click.group(cls=Grouped, context_settings={"max_content_width": 120})
@click.version_option(__version__, prog_name=NAME, message="%(prog)s %(version)s")
def main() -> None:
    """Train the project in this folder, and prove that its runs repeat bit for bit. See also `samebits VERB --help`."""


for stage in (front.prepare, front.train, front.evaluate):
    main.add_command(stage)


@main.command()
@overriding
@click.pass_obj
def config(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Print the value of each key, and which ones enter the content address or choose the numeric environment."""
    settings = load(ours.schema, overrides=overrides)
    _print({"config": settings.flat(), "addressed": settings.addressed(), "environment": settings.environmental()})


@main.command()
@overriding
@click.pass_obj
def address(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Print a run's content address and all that enters it."""
    from .address import manifest
    from .address.address import content_address

    settings = load(ours.schema, overrides=overrides)
    prepared = manifest.read(Path(settings.data.prepared))
    _print(content_address(ours.project, settings, prepared).record())


@main.command()
@overriding
@click.pass_obj
def env(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Print the numeric environment of a run here."""
    from .core import flags

    settings = load(ours.schema, overrides=overrides)
    flags.set_environment(settings.options.determinism)
    flags.apply(settings.options.determinism)

    from .core.ranks import device_of
    from .environment import environment  # imports torch, so only now

    own = settings.environment.variables
    preimage = environment.numeric_environment(settings.options.determinism, device_of(settings.device), own)
    _print(environment.record(preimage, settings.compute))


@main.command("hash-data")
@overriding
@click.option("--files", is_flag=True, help="Print the SHA-256 of each file of the folder, as sha256sum does.")
@click.pass_obj
def hash_data(ours: Ours, overrides: tuple[str, ...], files: bool) -> None:
    """Print the SHA-256 of the dataset, for data.sha256 in params.yaml.

    That of a folder is the SHA-256 of what --files prints.
    """
    from .address import manifest

    held = manifest.read_raw(load(ours.schema, overrides=overrides).data)
    click.echo(manifest.listing(held) if files else manifest.digest(held), nl=not files)


@main.command("check-data")
@overriding
@click.pass_obj
def check_data(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Compare the dataset with its SHA-256 in params.yaml."""
    from .address import manifest

    manifest.require_raw(load(ours.schema, overrides=overrides).data)


@main.command()
@click.argument("run", type=Folder, default="artifacts")
@click.pass_obj
def sync(ours: Ours, run: Path) -> None:
    """Upload to MLflow the part of a run that it lacks."""
    from .address.locks import LOCKS
    from .tracking import tracking

    click.echo(tracking.sync(run, ours.project.root / LOCKS)["where"])


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
