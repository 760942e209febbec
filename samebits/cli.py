"""The `repro` command: `repro --help` lists the verbs, grouped by what a person wants."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from .base.output import outlive_readers
from .base.project import Project, work_for
from .config.params import load
from .config.settings import Settings
from .core.errors import RunError, of_system
from .core.place import rank_and_size
from .start.launch import overriding

Folder = click.Path(file_okay=False, path_type=Path)

# What a person wants -> the verbs that do it, in the order of `repro --help`.
GROUPS = {
    "Train": ("prepare", "train", "evaluate"),
    "Ask": ("docs", "config", "address", "env", "diff"),
    "Prove": ("doctor", "smoke", "hash-data", "check-data", "check", "verify", "verify-receipt"),
    "Measure": ("audit", "bisect", "compare", "cost", "noise", "trial"),
    "Hand on": ("accept", "bundle", "replay", "report", "sync"),
}


class Ours(NamedTuple):
    """The project that the command is about, and the schema of its params.yaml."""

    project: Project
    schema: type[Settings]

    def tracking_uri(self) -> str:
        """Where MLflow keeps this project's runs."""
        from .tracking.tracking import address_of

        return address_of(load(self.schema).tracking.uri)


class Grouped(click.Group):
    """Verbs in groups, each with its whole line; a failure that a user can cause ends in a line and an exit code."""

    def invoke(self, context: click.Context) -> Any:
        """Run the verb."""
        outlive_readers()
        work_for(context.obj.project)
        try:
            return super().invoke(context)
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
        """The verb of this name. Those of analysis are loaded on request: `repro train` loads none."""
        if name in self.commands:
            return super().get_command(context, name)
        from .analysis.verbs import VERBS

        return VERBS.get(name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List every verb with the first line of its help, uncut."""
        found = {verb: self.get_command(context, verb) for verb in self.list_commands(context)}
        helped = {verb: command.get_short_help_str(limit=200) for verb, command in found.items() if command}
        width = max(map(len, helped))  # so that all groups have their lines in one column
        for title, verbs in GROUPS.items():
            rows = [(verb.ljust(width), helped[verb]) for verb in verbs]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(cls=Grouped, context_settings={"max_content_width": 120})
def main() -> None:
    """Train this project, and prove that its runs repeat bit for bit. `repro VERB --help` tells more of a verb."""


def _stage(name: str, line: str) -> None:
    """Make a stage a verb. Its module runs as by `python -m`, because it sets its own environment."""

    @main.command(name, help=line, add_help_option=False, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_obj
    def stage(ours: Ours, arguments: tuple[str, ...]) -> None:
        sys.argv = [name, *arguments]
        runpy.run_module(f"{ours.project.name}.{name}", run_name="__main__", alter_sys=True)


_stage("prepare", "Write the training and test sets from the dataset.")
_stage("train", "Train; --ranks N trains on N processes, to the same bits.")
_stage("evaluate", "Measure a run's weights on the test set.")


@main.command()
@overriding
@click.pass_obj
def config(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Print the value of each key, and which ones enter the content address or choose the numeric environment."""
    settings = load(ours.schema, overrides=overrides)
    _print({"config": settings.flat(), "addressed": settings.addressed(), "environment": settings.environment()})


@main.command()
@overriding
@click.pass_obj
def address(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Print a run's content address and all that enters it."""
    from .address import manifest
    from .address.address import content_address

    settings = load(ours.schema, overrides=overrides)
    prepared = manifest.read(Path(settings.data.prepared))
    _print(content_address(ours.project, settings, prepared, rank_and_size()[1]).record())


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

    preimage = environment.numeric_environment(settings.options.determinism, device_of(settings.device))
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
