"""The verbs of the `samebits` command that ask analysis. cli.py loads them when one is asked for, and no run does."""

import json
import shutil
import sys
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

import click

from ..base.files import durable
from ..base.shape import plain
from ..config.params import load
from ..core.errors import UserError
from ..front import overriding
from . import measure
from .fonts import load_matplotlib
from .options import Folder, Ours, as_json_option, run_patch_option, signers_option


@click.command()
@overriding
@as_json_option
@click.pass_obj
def doctor(ours: Ours, overrides: tuple[str, ...], as_json: bool) -> None:
    """Look for what would make a run fail, or not be repeatable: a checklist.

    Code, packages, data, environment, random numbers, hardware, services. It ends with 1 if a check finds a FAULT.
    """
    from ..core import flags
    from .doctor.doctor import examine, summary

    settings, rows = load(ours.schema, overrides=overrides), []
    with suppress(UserError):  # the check of the flags tells it
        flags.set_environment(settings.options.determinism)
    for row in examine(ours.project, settings):
        rows.append(row)
        if not as_json:
            click.echo("\n".join(row.lines()))
    healthy, said = summary(rows)
    click.echo(json.dumps([row.stated() for row in rows], indent=2) if as_json else said)
    sys.exit(0 if healthy else 1)


@click.command()
@overriding
@click.pass_obj
def smoke(ours: Ours, overrides: tuple[str, ...]) -> None:
    """Train a short run on one process and evaluate it: does the whole way work? Seconds.

    `verify.shorten` in params.yaml makes it short. It is written into build/smoke, and is not tracked.
    """
    from ..record.receipt import read
    from ..start import trainings
    from .verify import shortened

    settings, requested, _ = shortened(ours.schema, overrides)
    trainings.prepared(ours.project, settings, click.echo)
    out = ours.project.root / "build" / "smoke"
    shutil.rmtree(out, ignore_errors=True)
    for stage in ("train", "evaluate"):
        words = trainings.command(stage, {"tracking.enabled": False, **requested}, "--out", out)
        lines = trainings.run(ours.project, words).strip().splitlines()
        # evaluate() of a new blank project measures nothing
        last = lines[-1].strip() if lines else "done, it printed nothing"
        click.echo(f"{stage}: {last if stage == 'evaluate' else f'weights {read(out).weights}'}")


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
        if values and not place:
            click.echo("--values: no step differs, so there are no values to compare")
        if place:
            from .trust import Trust
            from .values import lines as lines_of

            trust = Trust(signers, run_patch)
            click.echo("\n".join(lines_of(ours.project, (this, that), place.step, place.phase, trust, click.echo)))
    sys.exit(0 if equal else 1)


@click.command()
@click.argument("run", type=Folder, default="artifacts")
@overriding
@click.pass_obj
def check(ours: Ours, run: Path, overrides: tuple[str, ...]) -> None:
    """Compare a run with the project and with its locks.

    A run that the project as it stands would not make is STALE. Otherwise its weights and metrics must be those that
    results.lock expects; where DVC made the run, its outputs must be those of the committed dvc.lock.
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
@click.option("--full", is_flag=True, help="Train to the end, and not as `verify.shorten` in params.yaml says.")
@click.pass_obj
def verify(ours: Ours, overrides: tuple[str, ...], ranks: int | None, only: tuple[str, ...], full: bool) -> None:
    """Train in many ways that must give identical weights.

    It reports EQUAL or DIFFERS for each way, by its NAME, or why it was not tried. The trainings are shortened as
    `verify.shorten` in params.yaml says.
    """
    from ..start.trainings import prepared
    from .controls import chosen_controls, conclusion, try_controls
    from .verify import chosen, places_here, shortened, starting, train_in_all_ways

    controls, of_ways = chosen_controls(only)
    ways = chosen(of_ways) if of_ways or not only else ()
    settings, requested, vary = shortened(ours.schema, overrides, full)
    prepared(ours.project, settings, click.echo)
    places, rows = ranks or places_here(settings.device), []
    with starting(ours.project, settings, click.echo) as start:
        trained = train_in_all_ways(ours.project, settings, places, start, requested, click.echo, ways, vary)
        for row in chain(trained, try_controls(ours.project, settings.seed, start, requested, controls)):
            rows.append(row)
            click.echo(f"{row.name:30}  {row.weights[:16]:16}  {(row.trace or '')[:16]:16}  {row.verdict}")
    holds, lines = conclusion(rows, bool(ways))
    click.echo("\n".join(lines))
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
@click.option("--noise", type=Path, help="The noise floor, as `samebits noise --json` prints it.")
@click.option("--cost", type=Path, help="The cost of determinism, as `samebits cost --json` prints it.")
@click.option("--doctor", type=Path, help="The checklist, as `samebits doctor --json` prints it.")
@click.option("--out", type=Path, default=Path("build", "report.html"), show_default=True, help="The page.")
@click.option("--log", is_flag=True, help="Add the page to the MLflow run of each RUN, too.")
@click.pass_obj
def report(
    ours: Ours, runs: tuple[str, ...], noise: Path | None, cost: Path | None, doctor: Path | None, out: Path, log: bool
) -> None:
    """Write one HTML page on runs: bits, curves, times.

    RUN is a run directory, a receipt or an MLflow run id, of a finished run or not. The page needs no other file and no
    network.
    """
    load_matplotlib()
    from .report import measured
    from .report.publish import publish
    from .report.report import Extras

    extras = Extras(
        measured.read(noise, measured.Noise, "noise"),
        measured.read(cost, measured.Cost, "cost"),
        measured.read(doctor, list[measured.Check], "doctor"),
    )
    for line in publish(runs, cache(ours.tracking_uri), extras, out, log):
        click.echo(line)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=Folder, metavar="RUN...")
@click.option("--out", default="bundle.tar", show_default=True, type=Path, help="The archive.")
@click.option("--weights", is_flag=True, help="Put the weights in, too.")
@click.pass_obj
def bundle(ours: Ours, runs: tuple[Path, ...], out: Path, weights: bool) -> None:
    """Pack finished runs for an artifact evaluation, in one archive.

    It holds their receipts, report, locks, data manifests as Croissant, a citation file, and an appendix that says how
    to check each claim. The same runs give the same bytes. `samebits replay`, `diff` and `compare` take it as a run.
    """
    from .bundle.bundle import bundled

    if out.suffix != ".tar":
        raise UserError(f"--out {plain(str(out))}: a name that ends with .tar wanted")
    load_matplotlib()
    from .report.publish import paged
    from .report.report import Extras

    page, _ = paged([str(run) for run in runs], ours.tracking_uri, Extras())
    with durable(out) as beside:
        beside.write_bytes(bundled(ours.project, runs, page, weights))
    click.echo(f"{plain(str(out))}: {out.stat().st_size / 1000:.0f} kB on {len(runs)} run{'s' * (len(runs) > 1)}")


@click.command()
@click.argument("word", required=False)
def docs(word: str | None) -> None:
    """List the pages of the library, by task; show the one of a name, or find those that have a WORD."""
    from . import pages

    click.echo_via_pager(pages.about(word) if word else pages.listing())


@click.command()
@click.argument("source", metavar="PATH", type=Path)
@click.option("--only", multiple=True, metavar="NAME", help="Verify this way alone; repeatable.")
@click.option("--force", is_flag=True, help="Give up what was modified in vendor/samebits.")
@click.pass_obj
def upgrade(ours: Ours, source: Path, only: tuple[str, ...], force: bool) -> None:
    """Take the library of another release, proved on your model.

    PATH is a checkout of the template's repository, or another project; PATH@REF is a commit of it. It says whether
    results stay valid, brings pyproject.toml and the locks to what the release asks for, and runs `verify` with it.
    Where that fails, everything is put back.
    """
    from .upgrade import upgrade

    upgrade(ours.project, source, only, force, click.echo)


@click.command(hidden=True)
def pipeline() -> None:
    """Run the stages of dvc.yaml that have changed, without DVC's hints: `make repro` calls it."""
    from .pipeline import main

    sys.exit(main())


HERE = accept, bundle, check, diff, docs, doctor, pipeline, replay, report, smoke, upgrade, verify, verify_receipt
VERBS: dict[str, click.Command] = {str(verb.name): verb for verb in (*HERE, *measure.VERBS)}
