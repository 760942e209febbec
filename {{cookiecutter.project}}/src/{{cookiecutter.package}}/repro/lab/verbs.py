"""Verbs of the `repro` command that cli.py does not load until one of them is asked for."""

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Protocol

import click

from ..asked.params import load
from ..asked.settings import Settings
from ..errors import Refused
from ..launch import overriding
from ..project import Project

DIVIDER = "\0"  # no word of a command line can hold it


class Ours(Protocol):
    """What these verbs ask of the project that the command is about."""

    project: Project
    schema: type[Settings]

    def tracking_uri(self) -> str:
        """Where MLflow keeps its runs."""


class Divided(click.Command):
    """A verb whose words `--` divides. click would drop it, and take the options after it for words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words with a mark in place of each `--`, so that options may stand on either side."""
        return super().parse_args(ctx, [DIVIDER if word == "--" else word for word in args])


@click.command(cls=Divided)
@click.argument("words", nargs=-1, metavar="A... -- B...")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Compare this metric alone; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of random partitions and resamples."
)
@click.pass_obj
def compare(ours: Ours, words: tuple[str, ...], metrics: tuple[str, ...], as_json: bool, seed: int) -> None:
    """Say whether two groups of runs differ by more than noise.

    A and B are run directories, receipts, MLflow run ids, or experiment:NAME for all finished runs of an experiment in
    MLflow. It compares all final metrics but `steps`: their means by a permutation test, with an interval, and how far
    the runs spread. The exit code is 0 whatever the verdict.
    """
    from .compare import compare, lines
    from .groups import divided, read_group

    uri = cache(ours.tracking_uri)
    a, b = (read_group(group, uri) for group in divided(words, DIVIDER))
    facts = compare(a, b, metrics, seed)
    click.echo(json.dumps(asdict(facts), indent=2, allow_nan=False) if as_json else "\n".join(lines(facts)))


@click.command()
@overriding
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.pass_obj
def doctor(ours: Ours, overrides: tuple[str, ...], as_json: bool) -> None:
    """Look for what would make a run fail, or not be repeatable: a checklist.

    Code, packages, data, environment, random numbers, hardware, services. It ends with 1 if a check finds a FAULT.
    """
    from ..machine import switches
    from .doctor import examine, healthy, summary

    settings, rows = load(ours.schema, overrides=overrides), []
    with suppress(Refused):  # the check of the switches tells it
        switches.set_environment(settings.determinism)
    for row in examine(ours.project, settings):
        rows.append(row)
        if not as_json:
            click.echo("\n".join(row.lines()))
    click.echo(json.dumps([row.stated() for row in rows], indent=2) if as_json else summary(rows))
    sys.exit(0 if healthy(rows) else 1)


@click.command()
@overriding
@click.pass_obj
def smoke(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Train a short run on one process and evaluate it: does the whole way work? Seconds.

    `verify.shorten` in params.yaml makes it short. It is written into build/smoke, and is not tracked.
    """
    from . import trainings
    from .verify import shortened

    _, asked, _ = shortened(ours.schema, overrides)
    out = ours.project.root / "build" / "smoke"
    shutil.rmtree(out, ignore_errors=True)
    for stage in ("train", "evaluate"):
        words = trainings.command(ours.project, f".{stage}", {"tracking.enabled": False, **asked}, "--out", out)
        click.echo(f"{stage}: {trainings.run(ours.project, words).strip().splitlines()[-1].strip()}")


VERBS: dict[str, click.Command] = {"compare": compare, "doctor": doctor, "smoke": smoke}
