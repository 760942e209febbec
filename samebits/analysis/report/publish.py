"""A report brought to its readers: written as a file, and added to the MLflow runs that it is about."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from ...base.files import durable
from ...base.shape import plain
from ...core.errors import UserError
from ...record import names
from ...record.reading import read_record
from ...record.view import RunView
from ...tracking import tracking
from ..sources import located, requested
from . import public
from .report import Extras, report


def publish(given: Sequence[str], uri: Callable[[], str], extras: Extras, out: Path, log: bool) -> Iterator[str]:
    """Write the report on runs, named as the user names them, and say where it is; with `log`, in MLflow, too.

    Raises:
        UserError: a run is not to be found, is given twice, or was altered so that nothing of it can be read.
    """
    if out.suffix != ".html":
        raise UserError(f"--out {plain(str(out))}: a name that ends with .html wanted; a record is never written over")
    page, runs = paged(given, uri, extras, None if log else out.parent)
    out.parent.mkdir(parents=True, exist_ok=True)
    with durable(out) as beside:
        beside.write_text(page, "utf-8")
    yield f"{plain(str(out))}: {len(page.encode()) / 1000:.0f} kB on {len(runs)} run{'s' * (len(runs) > 1)}"
    for name, run in zip(given, runs, strict=True) if log else ():
        yield _logged(name, run, uri, out)


def paged(
    given: Sequence[str], uri: Callable[[], str], extras: Extras, folder: Path | None = None
) -> tuple[str, list[RunView]]:
    """The page on runs, and the runs. One that is to lie in `folder` links to the files of those in the same project.

    Raises:
        UserError: see `publish`.
    """
    with ExitStack() as stack:
        paths = [stack.enter_context(located(name, uri)) for name in given]
        runs = [RunView(path, name) for path, name in zip(paths, public.names(given), strict=True)]
        for run in runs:
            run.require_record()
        _require_different(given, runs)
        return report(runs, extras, _links(given, runs, folder) if folder else {}), runs


def _links(given: Sequence[str], runs: Sequence[RunView], folder: Path) -> dict[str, str]:
    """Relative URLs of run directories by the names of their runs, where these and `folder` lie in the current one."""
    here, beside = Path.cwd(), folder.resolve()
    paths = {run.name: run.path.resolve() for name, run in zip(given, runs, strict=True) if Path(name).exists()}
    return {
        name: f"{quote(os.path.relpath(path, beside))}/"
        for name, path in paths.items()
        if path.is_relative_to(here) and beside.is_relative_to(here)
    }


def _require_different(given: Sequence[str], runs: Sequence[RunView]) -> None:
    """Refuse a run that is given twice, under one name or two."""
    known = [run.receipt.name if run.receipt else run.facts.get("id", str(run.path.resolve())) for run in runs]
    for place, name in enumerate(given):
        if known[place] in known[:place]:
            first = given[known.index(known[place])]
            raise UserError(f"{plain(f'{first} and {name}')}: the same run given twice; give each run once")


def _logged(name: str, run: RunView, uri: Callable[[], str], page: Path) -> str:
    """Add the page to a run's artifacts in MLflow, and say so; say why not, where nothing of the run is there."""
    state = tracking.read_state(run.path)
    if not Path(name).exists():
        identity, at = name, uri()  # it was given by its id
    elif "run" not in state or not (run.path / names.RUN).is_file():
        return f"{plain(name)}: not in MLflow, the page was not added"
    else:
        identity, at = state["run"], tracking.address_of(read_record(run.path, names.RUN)["tracking"]["uri"])
    with requested(identity):
        from mlflow import MlflowClient

        MlflowClient(at).log_artifact(identity, str(page))
    return f"{plain(name)}: added to MLflow run {identity}"
