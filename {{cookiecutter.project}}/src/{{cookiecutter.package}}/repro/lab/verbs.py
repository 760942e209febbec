"""The verbs of the `repro` command that ask the lab. cli.py loads them when one is asked for, and no run does."""

import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Protocol

import click

from ..asked.params import load
from ..asked.settings import Settings
from ..errors import Refused
from ..launch import overriding
from ..project import Project

Folder = click.Path(file_okay=False, path_type=Path)
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


signers_option = click.option(
    "--signers", type=Path, help="The keys to trust: an allowed-signers file, as in ssh-keygen(1)."
)
run_patch_option = click.option(
    "--run-patch",
    is_flag=True,
    help="Run the uncommitted code of a record (code.patch), whoever wrote it: it may do all that you may do.",
)


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
    from ..records.receipt import read
    from . import trainings
    from .verify import shortened

    _, asked, _ = shortened(ours.schema, overrides)
    out = ours.project.root / "build" / "smoke"
    shutil.rmtree(out, ignore_errors=True)
    for stage in ("train", "evaluate"):
        words = trainings.command(ours.project, f".{stage}", {"tracking.enabled": False, **asked}, "--out", out)
        said = trainings.run(ours.project, words).strip().splitlines()
        click.echo(f"{stage}: {said[-1].strip() if stage == 'evaluate' else f'weights {read(out).weights}'}")


@click.command()
@overriding
@click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON.")
@click.pass_obj
def audit(ours: Ours, overrides: tuple[str, ...], as_json: bool) -> None:
    """Find what puts the bits at risk: operations of one step, and lines of your code.

    One step of your training is made, into build/audit, and your files are read. A comment `# audit: fine, REASON` on
    a line silences what is found there. Exit code 0: nothing is found; 1: findings; 2: the input is wrong.
    """
    from .audit import audited

    found = audited(ours.project, ours.schema, overrides)
    click.echo(json.dumps(found.record(), indent=2) if as_json else "\n".join(found.lines()))
    if found.failed:
        raise Refused(found.failed)
    sys.exit(1 if found.counted else 0)


@click.command()
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
    from . import diff
    from .sources import located

    with located(one, ours.tracking_uri) as this, located(other, ours.tracking_uri) as that:
        sides = diff.load(this, one), diff.load(that, other)
        equal, lines = diff.report(*sides)
        click.echo("\n".join(lines))
        place = diff.first_place(*sides) if values and not equal else None
        if place:
            from .trust import Trust
            from .values import report

            trust = Trust(signers, run_patch)
            click.echo("\n".join(report(ours.project, (this, that), place.step, place.phase, trust, click.echo)))
    sys.exit(0 if equal else 1)


@click.command()
@click.argument("run", type=Folder, default="artifacts")
@overriding
@click.pass_obj
def check(ours: Ours, run: Path, overrides: tuple[str, ...]) -> None:
    """Compare a run with the project and with its locks.

    A run that the project as it stands would not make is STALE. Otherwise its weights and metrics must be those that
    results.lock expects; where DVC made the run, dvc.lock must be as committed.
    """
    from . import results

    verdicts = results.check(ours.project, load(ours.schema, overrides=overrides), run)
    for verdict in verdicts:
        click.echo(verdict.sentence)
    sys.exit(0 if all(verdict.holds for verdict in verdicts) else 1)


@click.command()
@overriding
@click.option("--ranks", type=click.IntRange(min=1), help="At most so many ranks; else one per GPU, or 4 on a CPU.")
@click.option("--only", multiple=True, metavar="NAME", help="Compare this way alone with one process; repeatable.")
@click.pass_obj
def verify(ours: Ours, overrides: tuple[str, ...], ranks: int | None, only: tuple[str, ...]) -> None:
    """Train in a dozen ways that must give identical weights.

    It reports EQUAL or DIFFERS for each way, by its NAME. The trainings are shortened as `verify.shorten` in
    params.yaml says.
    """
    from .verify import chosen, places_here, shortened, train_in_all_ways

    ways, (settings, asked, vary) = chosen(only), shortened(ours.schema, overrides)
    places, verdicts = ranks or places_here(settings.device), []
    for row in train_in_all_ways(ours.project, settings, places, asked, click.echo, ways, vary):
        verdicts.append(row.verdict)
        click.echo(f"{row.name:30}  {row.weights[:16]:16}  {(row.trace or '')[:16]:16}  {row.verdict}")
    tried = [verdict for verdict in verdicts if not verdict.startswith("not tried")]
    holds = all(verdict == "EQUAL" for verdict in tried) and len(tried) > 1
    click.echo(f"{'EQUAL' if holds else 'DIFFERS'}: {tried.count('EQUAL')} of {len(tried)} trainings")
    sys.exit(0 if holds else 1)


@click.command("verify-receipt")
@click.argument("receipt", type=Path, default="artifacts")
@signers_option
@click.pass_obj
def verify_receipt(ours: Ours, receipt: Path, signers: Path | None) -> None:
    """Check a receipt: in itself, with the files beside it, and its signature.

    RECEIPT is a file, or a run directory that holds one. Only a signature by a key that you trust, given with
    --signers, tells who wrote it; without one, all of it may be made up.
    """
    from .verify_receipt import report

    click.echo("\n".join(report(ours.project, receipt, signers)))


@click.command()
@click.argument("run", type=Folder, default="artifacts")
@click.option("--source", required=True, help="Where the result comes from, in words for those who compare with it.")
@click.pass_obj
def accept(ours: Ours, run: Path, source: str) -> None:
    """Make a run's outcome the expected one in results.lock."""
    from . import results

    click.echo(results.accept(ours.project, run, source))


@click.command()
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
    from .replay import replay
    from .sources import located
    from .trust import Trust

    with located(source, ours.tracking_uri) as path:
        sys.exit(0 if replay(ours.project, path, out, ranks, click.echo, Trust(signers, run_patch)) else 1)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--noise", type=Path, help="The noise floor, as `repro noise --json` prints it.")
@click.option("--cost", type=Path, help="The cost of determinism, as `repro cost --json` prints it.")
@click.option("--doctor", type=Path, help="The checklist, as `repro doctor --json` prints it.")
@click.option("--out", type=Path, default=Path("build", "report.html"), show_default=True, help="The page.")
@click.option("--log", is_flag=True, help="Add the page to the MLflow run of each RUN, too.")
@click.pass_obj
def report(
    ours: Ours, runs: tuple[str, ...], noise: Path | None, cost: Path | None, doctor: Path | None, out: Path, log: bool
) -> None:
    """Write one HTML page on runs, finished or not: bits, curves, times, differences.

    RUN is a run directory, a receipt or an MLflow run id. The page needs no other file and no network.
    """
    os.environ["MPLCONFIGDIR"] = str(ours.project.root / "build" / "matplotlib")  # read when matplotlib is loaded
    from . import measured
    from .publish import publish
    from .report import Extras

    extras = Extras(
        measured.read(noise, measured.NOISE_FILE, "noise"),
        measured.read(cost, measured.COST_FILE, "cost"),
        measured.read(doctor, measured.DOCTOR_FILE, "doctor"),
    )
    for line in publish(runs, cache(ours.tracking_uri), extras, out, log):
        click.echo(line)


VERBS: dict[str, click.Command] = {
    str(verb.name): verb
    for verb in (accept, audit, check, compare, diff, doctor, replay, report, smoke, verify, verify_receipt)
}
