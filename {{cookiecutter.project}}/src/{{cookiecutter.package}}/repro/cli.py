"""The `repro` command: `repro --help` lists the verbs, grouped by what a person wants."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from .asked.params import load
from .asked.settings import Settings
from .errors import Failure, of_system
from .launch import overriding
from .place import rank_and_size
from .project import Project

Folder = click.Path(file_okay=False, path_type=Path)

# What a person wants -> the verbs that do it, in the order of `repro --help`.
GROUPS = {
    "Train": ("prepare", "train", "evaluate"),
    "Ask": ("address", "env", "diff"),
    "Prove": ("doctor", "smoke", "hash-data", "check-data", "check", "verify", "verify-receipt"),
    "Measure": ("audit", "compare"),
    "Hand on": ("accept", "replay", "sync"),
}


class Ours(NamedTuple):
    """The project that the command is about, and the schema of its params.yaml."""

    project: Project
    schema: type[Settings]

    def tracking_uri(self) -> str:
        """Where MLflow keeps this project's runs."""
        from .records.tracking import address_of

        return address_of(load(self.schema).tracking.uri)


signers_option = click.option(
    "--signers", type=Path, help="The keys to trust: an allowed-signers file, as in ssh-keygen(1)."
)
run_patch_option = click.option(
    "--run-patch",
    is_flag=True,
    help="Run the uncommitted code of a record (code.patch), whoever wrote it: it may do all that you may do.",
)


class Grouped(click.Group):
    """Verbs in groups, each with its whole line; a failure that a user can cause ends in a line and an exit code."""

    def invoke(self, context: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(context)
        except (Failure, OSError) as error:
            failure = of_system(error) if isinstance(error, OSError) else error
            if not failure:
                raise
            click.echo(str(failure), err=True)
            sys.exit(failure.exit_code)

    def list_commands(self, context: click.Context) -> list[str]:
        """The names of all verbs."""
        return [verb for verbs in GROUPS.values() for verb in verbs]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The verb of this name. Those of the lab are loaded when they are asked for: `repro train` loads no lab."""
        if name in self.commands:
            return super().get_command(context, name)
        from .lab.verbs import VERBS

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


def _stage(name: str, line: str, module: str = "") -> None:
    """Make a stage a verb. Its module runs as by `python -m`, because it sets its own environment."""

    @main.command(name, help=line, add_help_option=False, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_obj
    def stage(ours: Ours, arguments: tuple[str, ...]) -> None:
        sys.argv = [name, *arguments]
        runpy.run_module(f"{ours.project.name}.{module or name}", run_name="__main__", alter_sys=True)


_stage("prepare", "Write the training and test sets from the dataset.")
_stage("train", "Train; --ranks N trains on N processes, to the same bits.")
_stage("evaluate", "Measure a run's weights on the test set.")
_stage("audit", "Find the operations and the lines of your code that put the bits at risk.", "repro.lab.audit")


@main.command()
@overriding
@click.pass_obj
def address(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Print a run's content address and all that enters it."""
    from .asked import manifest
    from .asked.address import content_address

    settings = load(ours.schema, overrides=overrides)
    prepared = manifest.read(Path(settings.data.prepared))
    _print(content_address(ours.project, settings, prepared, rank_and_size()[1]).record())


@main.command()
@overriding
@click.pass_obj
def env(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Print the numeric environment of a run here."""
    from .machine import switches

    settings = load(ours.schema, overrides=overrides)
    switches.set_environment(settings.determinism)
    switches.apply(settings.determinism)

    from .machine import environment  # imports torch, so only now
    from .training.world import device_of

    preimage = environment.numeric_environment(settings.determinism, device_of(settings.device))
    _print(environment.record(preimage, settings.compute))


@main.command()
@click.argument("one")
@click.argument("other")
@click.option("--values", is_flag=True, help="Make the step again in both, and say by how much the tensors differ.")
@signers_option
@run_patch_option
@click.pass_obj
def diff(ours: Ours, one: str, other: str, values: bool, signers: Path | None, run_patch: bool) -> None:
    """Find where two runs first differ, and the likely causes.

    It names the step, the phase and the tensor. ONE and OTHER are run directories, receipts or MLflow run ids.
    --values runs the uncommitted code of a run if this work tree holds the same, its receipt is signed by one of
    --signers, or --run-patch is given.
    """
    from .lab import diff
    from .lab.sources import located

    with located(one, ours.tracking_uri) as this, located(other, ours.tracking_uri) as that:
        sides = diff.load(this, one), diff.load(that, other)
        equal, lines = diff.report(*sides)
        click.echo("\n".join(lines))
        place = diff.first_place(*sides) if values and not equal else None
        if place:
            from .lab.trust import Trust
            from .lab.values import report

            trust = Trust(signers, run_patch)
            click.echo("\n".join(report(ours.project, (this, that), place.step, place.phase, trust, click.echo)))
    sys.exit(0 if equal else 1)


@main.command("hash-data")
@overriding
@click.option("--files", is_flag=True, help="Print the SHA-256 of each file of the folder, as sha256sum does.")
@click.pass_obj
def hash_data(ours: Ours, overrides: tuple[str, ...], files: bool) -> None:
    """Print the SHA-256 of the dataset, for data.sha256 in params.yaml.

    That of a folder is the SHA-256 of what --files prints.
    """
    from .asked import manifest

    held = manifest.read_raw(load(ours.schema, overrides=overrides).data)
    click.echo(manifest.listing(held) if files else manifest.digest(held), nl=not files)


@main.command("check-data")
@overriding
@click.pass_obj
def check_data(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Compare the dataset with its SHA-256 in params.yaml."""
    from .asked import manifest

    manifest.require_raw(load(ours.schema, overrides=overrides).data)


@main.command()
@click.argument("run", type=Folder, default="artifacts")
@overriding
@click.pass_obj
def check(ours: Ours, run: Path, overrides: tuple[str, ...]) -> None:
    """Compare a run with the project and with its locks.

    A run that the project as it stands would not make is STALE. Otherwise its weights and metrics must be those that
    results.lock expects; where DVC made the run, dvc.lock must be as committed.
    """
    from .lab import results

    verdicts = results.check(ours.project, load(ours.schema, overrides=overrides), run)
    for verdict in verdicts:
        click.echo(verdict.sentence)
    sys.exit(0 if all(verdict.holds for verdict in verdicts) else 1)


@main.command()
@overriding
@click.option("--ranks", type=click.IntRange(min=1), help="At most so many ranks; else one per GPU, or 4 on a CPU.")
@click.option("--only", multiple=True, metavar="NAME", help="Compare this way alone with one process; repeatable.")
@click.pass_obj
def verify(ours: Ours, overrides: tuple[str, ...], ranks: int | None, only: tuple[str, ...]) -> None:
    """Train in a dozen ways that must give identical weights.

    It reports EQUAL or DIFFERS for each way, by its NAME. The trainings are shortened as `verify.shorten` in
    params.yaml says.
    """
    from .lab.verify import chosen, places_here, shortened, train_in_all_ways

    ways, (settings, asked, vary) = chosen(only), shortened(ours.schema, overrides)
    places, verdicts = ranks or places_here(settings.device), []
    for row in train_in_all_ways(ours.project, settings, places, asked, click.echo, ways, vary):
        verdicts.append(row.verdict)
        click.echo(f"{row.name:30}  {row.weights[:16]:16}  {(row.trace or '')[:16]:16}  {row.verdict}")
    tried = [verdict for verdict in verdicts if not verdict.startswith("not tried")]
    holds = all(verdict == "EQUAL" for verdict in tried) and len(tried) > 1
    click.echo(f"{'EQUAL' if holds else 'DIFFERS'}: {tried.count('EQUAL')} of {len(tried)} trainings")
    sys.exit(0 if holds else 1)


@main.command("verify-receipt")
@click.argument("receipt", type=Path, default="artifacts")
@signers_option
@click.pass_obj
def verify_receipt(ours: Ours, receipt: Path, signers: Path | None) -> None:
    """Check a receipt: in itself, with the files beside it, and its signature.

    RECEIPT is a file, or a run directory that holds one. Only a signature by a key that you trust, given with
    --signers, tells who wrote it; without one, all of it may be made up.
    """
    from .lab.verify_receipt import report

    click.echo("\n".join(report(ours.project, receipt, signers)))


@main.command()
@click.argument("run", type=Folder, default="artifacts")
@click.option("--source", required=True, help="Where the result comes from, in words for those who compare with it.")
@click.pass_obj
def accept(ours: Ours, run: Path, source: str) -> None:
    """Make a run's outcome the expected one in results.lock."""
    from .lab import results

    click.echo(results.accept(ours.project, run, source))


@main.command()
@click.argument("source", metavar="RECEIPT|RUN|MLFLOW_RUN_ID", default="artifacts")
@click.option("--out", default="artifacts-replay", show_default=True, type=Folder, help="The new run directory.")
@click.option("--ranks", type=click.IntRange(min=1), help="The world size; any gives the same bits.")
@signers_option
@run_patch_option
@click.pass_obj
def replay(ours: Ours, source: str, out: Path, ranks: int | None, signers: Path | None, run_patch: bool) -> None:
    """Make a recorded run again and compare the bits.

    Its commit, its data and its config are taken from the record, in a work tree that is removed afterwards. Its
    uncommitted code is run if this work tree holds the same, the receipt is signed by one of --signers, or
    --run-patch is given.
    """
    from .lab.replay import replay
    from .lab.sources import located
    from .lab.trust import Trust

    with located(source, ours.tracking_uri) as path:
        sys.exit(0 if replay(ours.project, path, out, ranks, click.echo, Trust(signers, run_patch)) else 1)


@main.command()
@click.argument("run", type=Folder, default="artifacts")
@click.pass_obj
def sync(ours: Ours, run: Path) -> None:
    """Upload to MLflow the part of a run that it lacks."""
    from .asked.address import LOCKS
    from .records import tracking

    click.echo(tracking.sync(run, ours.project.root / LOCKS)["where"])


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
