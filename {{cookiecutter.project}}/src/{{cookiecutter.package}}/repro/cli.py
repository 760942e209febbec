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
@click.argument("one")
@click.argument("other")
@click.option("--values", is_flag=True, help="Make the step again in both and say by how much the tensors differ.")
@click.pass_obj
def diff(schema: Any, one: str, other: str, values: bool) -> None:
    """Say where two runs part: step, phase, tensor; and what may have caused it.

    ONE and OTHER are run directories, receipts or MLflow run ids.
    """
    from .lab import diff, receipts

    def uri() -> str:
        return tracking_uri(schema)

    with receipts.located(one, uri) as this, receipts.located(other, uri) as that:
        sides = diff.load(this, one), diff.load(that, other)
        equal, lines = diff.report(*sides)
        click.echo("\n".join(lines))
        place = diff.first_place(*sides) if values and not equal else None
        if place:
            from .lab.values import report

            click.echo("\n".join(report(this, that, place.step, place.phase, click.echo)))
    sys.exit(0 if equal else 1)


@main.command()
@click.argument("receipt", type=Path, default="artifacts")
@click.option("--signers", type=Path, help="The keys to trust: an allowed-signers file, as in ssh-keygen(1).")
def verify_receipt(receipt: Path, signers: Path | None) -> None:
    """Prove that a receipt (a file, or a run directory's) is as it was written, and by whom it was signed."""
    from .lab import receipts

    click.echo("\n".join(receipts.verify(receipt, signers)))


@main.command()
@click.argument("source", metavar="RECEIPT|RUN|MLFLOW_RUN_ID", default="artifacts")
@click.option("--out", default="artifacts-replay", show_default=True, type=Folder, help="The new run directory.")
@click.option("--ranks", type=click.IntRange(min=1), help="The world size; any gives the same bits.")
@click.pass_obj
def replay(schema: Any, source: str, out: Path, ranks: int | None) -> None:
    """Make a recorded run again, from its commit, data and config, and say whether it is reproduced."""
    from .lab import receipts
    from .lab.replay import replay

    with receipts.located(source, lambda: tracking_uri(schema)) as path:
        sys.exit(0 if replay(path, out, ranks, click.echo) else 1)


@main.command()
@overriding
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True, help="How long each training is.")
@click.option("--ranks", type=click.IntRange(min=1), help="At most so many ranks; else one per GPU, or 4 on a CPU.")
@click.pass_obj
def verify(schema: Any, overrides: tuple[str, ...], epochs: int, ranks: int | None) -> None:
    """Prove the contract here, for this model and data: trainings in many ways, all with the same bits."""
    from .lab.verify import verify

    overrides = (*overrides, f"train.epochs={epochs}")
    settings = load(schema, PARAMS, overrides)
    asked = {key: settings.flat()[key] for key in (text.partition("=")[0] for text in overrides)}
    verdicts = []
    for row in verify(settings, ranks or _places(settings.device), asked, click.echo):
        verdicts.append(row.verdict)
        click.echo(f"{row.name:30}  {row.weights[:16]:16}  {(row.trace or '')[:16]:16}  {row.verdict}")
    tried = [verdict for verdict in verdicts if not verdict.startswith("not tried")]
    holds = all(verdict == "EQUAL" for verdict in tried) and len(tried) > 1
    click.echo(f"{'EQUAL' if holds else 'DIFFERS'}: {tried.count('EQUAL')} of {len(tried)} trainings")
    sys.exit(0 if holds else 1)


def _places(device: str) -> int:
    """How many ranks fit here: one for each GPU, or four on a CPU, where they may share cores."""
    if device == "cpu":
        return 4
    import torch

    return torch.cuda.device_count() or 4


@main.command()
@click.argument("run", type=Folder, default="artifacts")
@click.option("--source", required=True, help="Where the result comes from, in words for those who compare with it.")
def accept(run: Path, source: str) -> None:
    """Make the outcome of the run in directory RUN what results.lock expects from now on."""
    from .lab import results

    click.echo(results.accept(run, source))


def tracking_uri(schema: Any) -> str:
    """Where MLflow keeps this project's runs."""
    from .tracking import address_of

    return address_of(load(schema, PARAMS).tracking.uri)


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
