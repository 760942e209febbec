"""The verbs that measure: they train, or compare trainings, and say by how much and why."""

import json
import sys
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import click

from ..core.errors import UserError
from ..front import overriding, ranks_option
from .fonts import load_matplotlib
from .options import Folder, Ours, as_json_option

SHARE, SEVERAL = click.FloatRange(0.5, 0.9999), click.IntRange(2, 1000)
DIVIDER = "\0"  # no word of a command line can hold it


class Divided(click.Command):
    """A verb whose words `--` divides. click would drop it, and take the options after it for words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words with a mark in place of each `--`, so that options may stand on either side."""
        return super().parse_args(ctx, [DIVIDER if word == "--" else word for word in args])


@click.command()
@overriding
@as_json_option
@click.pass_obj
def audit(ours: Ours, overrides: tuple[str, ...], as_json: bool) -> None:
    """Find what puts the bits at risk: operations of one step, and lines of your code.

    One step of your training is made, into build/audit, and your files are read. A comment `# audit: fine, REASON` on
    a line silences what is found there. Exit code 0: nothing is found; 1: findings; 2: the input is wrong.
    """
    from .audit.audit import audited

    found = audited(ours.project, ours.schema, overrides)
    click.echo(json.dumps(found.record(), indent=2) if as_json else "\n".join(found.lines()))
    if found.failed:
        raise UserError(found.failed)
    sys.exit(1 if found.counted else 0)


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN_A RUN_B]")
@click.option("--a", multiple=True, metavar="KEY=VALUE", help="Of A alone; also ranks=N, threads=N, env.NAME=VALUE.")
@click.option("--b", multiple=True, metavar="KEY=VALUE", help="Of B alone, likewise.")
@overriding
@click.option("--commits", nargs=2, metavar="GOOD BAD", help="A is this commit, and B is that one.")
@click.option("--confidence", default=0.95, show_default=True, type=SHARE, help="That no rare difference is missed.")
@click.option("--repeats", default=2, show_default=True, type=SEVERAL, help="How often A and B are made at first.")
@click.option("--long", is_flag=True, help="Train as asked for, not as verify.shorten in params.yaml says.")
@as_json_option
@click.pass_obj
def bisect(
    ours: Ours, runs: tuple[str, ...], a: tuple[str, ...], b: tuple[str, ...], overrides: tuple[str, ...],
    commits: tuple[str, str] | None, confidence: float, repeats: int, long: bool, as_json: bool,
) -> None:  # fmt: skip
    """Find the fewest keys, flags or files that make two runs differ.

    It trains with some values of A and the others of B; the world size, variables and neutral keys are suspects, too.
    Recorded runs are trained as long as they were, and their bits must come again first. Trainings are kept in
    build/bisect, so an interrupted bisect goes on. Exit code 0: EQUAL, or the cause is found; 1: it is not found.
    """
    from .bisect.cause import bisected
    from .bisect.sides import Named, requested

    named = Named(runs, a, b, overrides, commits, long)
    with requested(ours.project, ours.schema, named, ours.tracking_uri) as (maker, question):
        answer = bisected(maker, question, lambda line: click.echo(line, err=as_json), confidence, repeats)
    click.echo(json.dumps(answer.record(), indent=2) if as_json else "\n".join(answer.lines()))
    sys.exit(answer.exit_code)


@click.command(cls=Divided)
@click.argument("words", nargs=-1, metavar="A... -- B...")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Compare this metric alone; repeatable.")
@as_json_option
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
@click.option("--cycles", default=10, show_default=True, type=click.IntRange(min=1), help="How often all are trained.")
@click.option("--only", multiple=True, metavar="FLAG", help="Measure this flag alone, or `all`; repeatable.")
@as_json_option
@click.pass_obj
def cost(ours: Ours, overrides: tuple[str, ...], cycles: int, only: tuple[str, ...], as_json: bool) -> None:
    """Measure the time and memory that strict training costs, by flag.

    Each cycle trains once strictly, and once for each flag with that one relaxed. The trainings are shortened as
    `verify.shorten` in params.yaml says, and kept in build/cost: an interrupted measurement goes on.
    """
    from ..start import trainings
    from .cost import lines, measure
    from .series import Series
    from .verify import shortened

    settings, requested, _ = shortened(ours.schema, overrides)
    place, report = Path("build", "cost"), partial(click.echo, err=as_json)
    series = Series(ours.project, ours.schema, place, trainings.texts(requested), report)
    costs = measure(series, settings.options.determinism, cycles, only)
    click.echo(json.dumps(costs.record(), indent=2) if as_json else "\n".join(lines(costs)))


@click.command()
@overriding
@click.option("--runs", type=int, help="Of each group; 5 if it is not given.")
@click.option("--short", is_flag=True, help="Shorten the trainings as `verify.shorten` in params.yaml says.")
@as_json_option
@click.option("--out", default="build/noise", show_default=True, type=Folder, help="Where the trainings are kept.")
@click.option("--perturb", "kind", type=click.Choice(["batch", "weight", "gradient"]), help="Where one ULP is added.")
@click.option("--at", type=click.IntRange(min=0), help="The step of --perturb, counted from 0; 0 if it is not given.")
@click.pass_obj
def noise(ours: Ours, /, runs: int | None, kind: str | None, at: int | None, as_json: bool, **requested: Any) -> None:
    """Measure the noise floor: relaxed trainings beside strict ones and seeds.

    It tells how far final metrics, the last logged loss and weights spread. An interrupted verb goes on where it was.

    --perturb adds one ULP to the largest element of the first tensor of a batch, of the weights or of their gradient,
    and tells how far it grows. It trains on one process. results.lock says how far a metric may move: `perturbation`,
    or else `tolerance`.

    Exit code 1: strict trainings differ, or one ULP moves a metric farther than is accepted.
    """
    if runs is not None if kind else at is not None:
        raise UserError("--runs is for groups, --at for --perturb: give one or the other")

    requested["report"] = partial(click.echo, err=True)
    found: Any
    if kind:
        from .noise.perturb import perturbation

        found = perturbation(ours.project, ours.schema, kind=kind, at=at or 0, **requested)
    else:
        from .noise.noise import noise

        found = noise(ours.project, ours.schema, runs=5 if runs is None else runs, **requested)
    click.echo(json.dumps(found.record(), indent=2, allow_nan=False) if as_json else "\n".join(found.lines()))
    sys.exit(0 if found.holds else 1)


@click.command()
@click.argument("change", nargs=-1, required=True, metavar="KEY=VALUE...")
@overriding
@click.option("--pairs", default=6, show_default=True, type=click.IntRange(min=1), help="How many seeds are trained.")
@click.option("--record", is_flag=True, help="Append the outcome to trials.yaml, the sheet of all trials.")
@as_json_option
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


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="KEY=VALUES...")
@overriding
@ranks_option
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(min=1), help="Train so many runs at a time.")
@click.option("--out", default="runs/sweep", show_default=True, type=Folder, help="The folder of the runs.")
@click.pass_obj
def sweep(ours: Ours, words: tuple[str, ...], overrides: tuple[str, ...], ranks: int, jobs: int, out: Path) -> None:
    """Train each combination of values: KEY=VALUE,VALUE or KEY=FIRST..LAST, such as seed=0..4.

    Content addresses come first, and in the end a table and a picture of the metrics, with intervals over seeds. Runs
    that are done are not made again, and unfinished ones go on. Exit code 1: a run failed, and the others went on.
    """
    from .sweep import made, places, planned, tracked

    report = partial(click.echo, err=True)
    runs = planned(ours.project, ours.schema, words, overrides, ranks, out, report)
    where = places(runs, ranks, jobs)
    done = {each.address for each in runs if each.is_done()}
    for each in runs:
        click.echo(f"{each.address[:16]}  {each.name}{'  made before' * (each.address in done)}")
    parent = tracked(ours.project, runs, report) if len(done) < len(runs) else ""
    given = [*overrides, *[f"tracking.parent={parent}"] * bool(parent)]
    try:
        failed = made(ours.project, runs, given, ranks, where, report)
    except KeyboardInterrupt:
        if parent:
            tracked(ours.project, runs, report, "KILLED")
        raise
    load_matplotlib()
    from .swept import Swept

    found = Swept(runs)
    files = found.write(ours.project.root / out)
    names, verb = " and ".join(file.name for file in files), "lie" if len(files) > 1 else "lies"
    click.echo("\n".join([*found.lines(), f"{names} {verb} in {out}"]))
    if parent:
        tracked(ours.project, runs, report, "FAILED" if failed else "FINISHED", files)
    click.echo("".join(f"{each.line()}\n" for each in failed), nl=False, err=True)
    sys.exit(1 if failed else 0)


VERBS: tuple[click.Command, ...] = (audit, bisect, compare, cost, noise, sweep, trial)
