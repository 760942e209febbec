"""The verbs of the `repro` command that ask the lab. cli.py loads them when one is asked for, and no run does."""

import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

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
@click.argument("runs", nargs=-1, metavar="[RUN_A RUN_B]")
@click.option("--a", multiple=True, metavar="KEY=VALUE", help="Of A alone; also ranks=N, threads=N, env.NAME=VALUE.")
@click.option("--b", multiple=True, metavar="KEY=VALUE", help="Of B alone, likewise.")
@overriding
@click.option("--commits", nargs=2, metavar="GOOD BAD", help="A is this commit, and B is that one.")
@click.option(
    "--confidence", default=0.95, show_default=True, type=click.FloatRange(0.5, 0.9999), help="For rare causes."
)
@click.option(
    "--repeats", default=2, show_default=True, type=click.IntRange(2, 1000), help="So often A and B are made."
)
@click.option("--long", is_flag=True, help="Train as asked for, not as verify.shorten in params.yaml says.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.pass_obj
def bisect(
    ours: Ours, runs: tuple[str, ...], a: tuple[str, ...], b: tuple[str, ...], overrides: tuple[str, ...],
    commits: tuple[str, str] | None, confidence: float, repeats: int, long: bool, as_json: bool,
) -> None:  # fmt: skip
    """Find what makes two runs differ: the fewest keys, switches, ranks, variables or files.

    It trains with some values of A and the others of B. Of recorded runs, which are trained as long as they were,
    the bits must come again first. Trainings are kept in build/bisect, and an interrupted bisect goes on. Exit code 0:
    EQUAL, or the cause is found; 1: it is not; 2: the input is wrong.
    """
    from .cause import bisected
    from .sides import Named, asked

    named = Named(runs, a, b, overrides, commits, long)
    with asked(ours.project, ours.schema, named, ours.tracking_uri) as (maker, question):
        answer = bisected(maker, question, lambda line: click.echo(line, err=as_json), confidence, repeats)
    click.echo(json.dumps(answer.record(), indent=2) if as_json else "\n".join(answer.lines()))
    sys.exit(answer.exit_code)


@click.command()
@overriding
@click.option("--cycles", default=10, show_default=True, type=click.IntRange(min=1), help="How often all are trained.")
@click.option("--only", multiple=True, metavar="SWITCH", help="Measure this switch alone, or `all`; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
@click.pass_obj
def cost(ours: Ours, overrides: tuple[str, ...], cycles: int, only: tuple[str, ...], as_json: bool) -> None:
    """Measure the time and memory that strict training costs, by switch.

    Each cycle trains once strictly, and once for each switch with that one relaxed. The trainings are shortened as
    `verify.shorten` in params.yaml says, and kept in build/cost: an interrupted measurement goes on.
    """
    from . import trainings
    from .cost import lines, measure
    from .series import Series
    from .verify import shortened

    settings, asked, _ = shortened(ours.schema, overrides)
    place, tell = Path("build", "cost"), partial(click.echo, err=as_json)
    series = Series(ours.project, ours.schema, place, trainings.texts(asked), tell)
    costs = measure(series, settings.determinism, cycles, only)
    click.echo(json.dumps(costs.record(), indent=2) if as_json else "\n".join(lines(costs)))


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
@overriding
@click.option("--runs", type=int, help="Of each group; 5 if it is not given.")
@click.option("--short", is_flag=True, help="Shorten the trainings as `verify.shorten` in params.yaml says.")
@click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON.")
@click.option("--out", default="build/noise", show_default=True, type=Folder, help="Where the trainings are kept.")
@click.option("--perturb", "kind", type=click.Choice(["batch", "weight", "gradient"]), help="Where one ULP is added.")
@click.option("--at", type=click.IntRange(min=0), help="The step of --perturb, counted from 0; 0 if it is not given.")
@click.pass_obj
def noise(ours: Ours, /, runs: int | None, kind: str | None, at: int | None, as_json: bool, **asked: Any) -> None:
    """Measure the noise floor: relaxed trainings beside strict ones and seeds.

    It tells how far final metrics, the last logged loss and weights spread. An interrupted verb goes on where it was.

    --perturb adds one ULP to the largest element of the first tensor of a batch, of the weights or of their gradient,
    and tells how far it grows. It trains on one process. results.lock says how far a metric may move: `perturbation`,
    or else `tolerance`.

    Exit code 1: strict trainings differ, or one ULP moves a metric farther than is accepted.
    """
    if runs is not None if kind else at is not None:
        raise Refused("--runs is for groups, --at for --perturb: give one or the other")

    asked["tell"] = partial(click.echo, err=True)
    found: Any
    if kind:
        from .perturb import perturbation

        found = perturbation(ours.project, ours.schema, kind=kind, at=at or 0, **asked)
    else:
        from .noise import noise

        found = noise(ours.project, ours.schema, runs=5 if runs is None else runs, **asked)
    click.echo(json.dumps(found.record(), indent=2, allow_nan=False) if as_json else "\n".join(found.lines()))
    sys.exit(0 if found.holds else 1)


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


@click.command()
@click.argument("change", nargs=-1, required=True, metavar="KEY=VALUE...")
@overriding
@click.option("--pairs", default=6, show_default=True, type=click.IntRange(min=1), help="How many seeds are trained.")
@click.option("--record", is_flag=True, help="Append the outcome to trials.yaml, the sheet of all trials.")
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON.")
@click.pass_obj
def trial(
    ours: Ours, change: tuple[str, ...], overrides: tuple[str, ...], pairs: int, record: bool, as_json: bool
) -> None:
    """Say whether a change of the config may become the default.

    Each pair trains one seed without the change and with it. `trial` in results.lock says how far metrics, time and
    memory may move. The trainings are kept in build/trial: an interrupted trial goes on. It ends with 1 unless all
    criteria hold.
    """
    from .series import Series
    from .trial import HOLDS, enter, lines, tried

    series = Series(ours.project, ours.schema, Path("build", "trial"), overrides, partial(click.echo, err=as_json))
    found = tried(series, change, pairs)
    click.echo(json.dumps(found.record(), indent=2) if as_json else "\n".join(lines(found)))
    if record:
        click.echo(enter(ours.project, found), err=as_json)
    sys.exit(0 if found.verdict == HOLDS else 1)


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
    for verb in (accept, audit, bisect, check, compare, cost, diff, doctor, noise, replay, report, smoke, trial, verify, verify_receipt)
}
