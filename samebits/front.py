"""The front door: a stage starts, from the command line to the owner's function, and ends in plain words on failure.

`samebits train` reads params.yaml, sets the environment and starts Python once with it, because torch and numpy read
variables when they load. It hashes the code and watches which files are opened, and only then imports the owner's
modules. So nothing has to stand before the imports of `train.py`.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from . import loader
from .address import loaded, manifest
from .base import loading
from .base.output import outlive_readers
from .base.project import NAME, Project, work_for
from .config.params import PARAMS, load
from .config.settings import Data, Section, Settings
from .config.yaml_file import read_yaml
from .core.errors import RunError, UserError, of_system
from .core.flags import missing_variables, require_held, set_environment, stated_variables
from .core.seeds import derive, seed_everything
from .environment import variables
from .guards import imported, opened, stages
from .start import anew

overriding = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of params.yaml; repeatable.",
)
out_option = click.option(
    "--out",
    default="artifacts",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The run directory.",
)
fresh_option = click.option(
    "--fresh",
    is_flag=True,
    help="Begin anew; a run in the directory, finished or not, is moved to earlier/ there.",
)
from_option = click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="RECEIPT",
    help="Begin with the weights of this run: its receipt, or its run directory.",
)
state_option = click.option(
    "--state", is_flag=True, help="Of --from, take the optimizer's state and the step, too, and go on from there."
)
profile_option = click.option(
    "--profile",
    metavar="FIRST:STOP",
    help="Write what the operations of these steps took, such as 10:13 for steps 10, 11 and 12, into trace/.",
)
quiet_option = click.option("--quiet", is_flag=True, help="Show no steps, only what came of them.")
ranks_option = click.option(
    "--ranks",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Start so many ranks on this host; any number gives the same bits.",
)
Function = Callable[..., None]
Work = Callable[[Any, Path], None]  # is given the config, or a section of it, and the run directory


class Ours:
    """The project in whose folder the command runs; it is looked at when a verb first asks."""

    @cached_property
    def project(self) -> Project:
        """The project.

        Raises:
            UserError: the folder holds none; or the library that runs is not the project's own.
        """
        project = Project.at(Path.cwd())
        loaded.require_own_library(project)
        loader.cover(project.name)
        variables.watch(project.name)
        work_for(project)
        return project

    @cached_property
    def schema(self) -> type[Settings]:
        """The schema of its params.yaml."""
        return schema(self.project)

    def tracking_uri(self) -> str:
        """Where MLflow keeps this project's runs."""
        from .tracking.tracking import address_of

        return address_of(load(self.schema).tracking.uri)


def main(stage: Function) -> NoReturn:
    """Start the stage of this name, as `samebits train` does: the last lines of train.py, prepare.py and evaluate.py.

        if __name__ == "__main__":
            sb.main(train)

    With them `python -m <package>.train` and `torchrun -m <package>.train` do what `samebits train` does: this process
    becomes that command. It loads torch a second time.
    """
    words = sys.orig_argv
    options = words[1 : words.index("-m")] if sys.modules["__main__"].__spec__ else []  # of Python itself
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *options, "-m", NAME, stage.__name__, *sys.argv[1:]])


def _verb(name: str, line: str) -> click.Command:
    """The command of a stage, with this line of help."""

    @click.command(name, help=line)
    @overriding
    @out_option
    @click.pass_obj
    def verb(
        ours: Ours,
        overrides: tuple[str, ...],
        out: Path,
        ranks: int = 1,
        fresh: bool = False,
        quiet: bool = False,
        source: Path | None = None,
        state: bool = False,
        profile: str | None = None,
    ) -> None:
        given = [
            *overrides,
            *["record.progress=false"] * quiet,
            *[f"trace.profile={json.dumps(profile)}"] * bool(profile),
        ]
        run(ours, name, given, out, ranks, fresh, source, state)

    return verb


prepare = _verb("prepare", "Write the training and test sets from the dataset.")
train = _verb("train", "Train; --ranks N trains on N processes, to the same bits.")
for option in (profile_option, quiet_option, fresh_option, state_option, from_option, ranks_option):
    option(train)
evaluate = _verb("evaluate", "Measure a run's weights on the test set.")


def run(
    ours: Ours,
    name: str,
    overrides: Sequence[str],
    out: Path,
    ranks: int = 1,
    fresh: bool = False,
    source: Path | None = None,
    state: bool = False,
) -> None:
    """Run a stage of the project `ours.project` in this process, to its end; a training may start from a `source`."""
    outlive_readers()
    try:
        project: Project = ours.project
        overrides = (*overrides, *_started(source, state, out))
        config = begin(project, overrides, out, ranks, trains=name == "train", fresh=fresh, reads=name != "prepare")
        if anew.handed():
            _prove_early(project, config, out)
        loading.load(*LOADED[name])
        function = _function(project, name)
    except RunError as failure:
        _end(failure)
    call(project, STAGES[name](project, function), config, out, only="data" if name == "prepare" else "")


def begin(
    project: Project,
    overrides: Sequence[str],
    out: Path,
    ranks: int = 1,
    trains: bool = False,
    fresh: bool = False,
    reads: bool = False,
) -> Settings:
    """The checked config of a stage whose code is hashed and watched from here on.

    On return the environment holds what torch and numpy read once, when they load. Where something was
    missing, this process has started itself again with it. A stage that `trains` may be asked for several ranks:
    then this process starts them, and ends with their exit code. One that is to be `fresh` finds no earlier run. One
    that `reads` the prepared data finds them, unless it is one of several ranks.
    """
    anew.remember(project)
    loaded.remember(project)
    opened.watch(project, [Path(sys.prefix), *([] if trains else [out])], out if trains else None)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of torchrun
        from .start.ranks import end_with_launcher

        end_with_launcher()
    config = load(schema(project), overrides=overrides)
    _require_ranks(config, ranks)
    if reads and "RANK" not in os.environ:
        missing_variables(config.options.determinism)  # it refuses them before data are prepared
        _prepare_missing(project, config)
    if fresh and _is_first():
        _set_aside(project, out)
    if ranks > 1:
        _start_ranks(config, overrides, out, ranks)
    set_environment(config.options.determinism)
    for name in (config.data.prepared, *config.unhashed.files):
        opened.know(project.root / name)
    return config


def _started(source: Path | None, state: bool, out: Path) -> list[str]:
    """The overrides that --from and --state stand for."""
    if source is None:
        if state:
            raise UserError("--state given without --from RECEIPT, which says whose")
        return []
    from .record.started import requested

    return [f"{key}={json.dumps(value)}" for key, value in requested(source, state, out).items()]


def _is_first() -> bool:
    """Whether this process is the only one, or rank 0, and has not been started again."""
    return not anew.handed() and all(os.environ.get(name, "0") == "0" for name in ("RANK", anew.COUNT))


def _prove_early(project: Project, config: Settings, out: Path) -> None:
    from .prove.early import prove  # it loads torch

    try:
        prove(project, config, out)
    except OSError as error:
        raise of_system(error) or error from None


def _set_aside(project: Project, out: Path) -> None:
    from .record.former import set_aside
    from .record.opening import require_run_directory

    require_run_directory(project, out)
    if kept := set_aside(out):
        print(f"the run in {out} is kept in {kept}", file=sys.stderr, flush=True)


def _prepare_missing(project: Project, config: Settings) -> None:
    from .start.trainings import prepare_missing

    prepare_missing(project, config, lambda line: print(line, file=sys.stderr, flush=True))


def schema(project: Project) -> type[Settings]:
    """The class `Config` of the owner's config.py.

    Raises:
        UserError: there is none.
    """
    found = getattr(_module(project, "config"), "Config", None)
    if not (isinstance(found, type) and issubclass(found, Settings)):
        seen = f"Config = {found!r}" if found else "no class Config"
        raise UserError(f"{_shown(project, 'config')}: {seen} seen, class Config({NAME}.Settings) wanted")
    return found


def _function(project: Project, name: str) -> Function:
    """The owner's function of a stage."""
    found = getattr(_module(project, name), name, None)
    if not callable(found):
        seen = f"{name} = {found!r}" if found else f"no function {name}"
        raise UserError(f"{_shown(project, name)}: {seen} seen, def {name}({SIGNATURES[name]}) wanted")
    return found


def _module(project: Project, name: str) -> Any:
    """A module of the owner's package, from the project's own folder.

    Raises:
        UserError: it is missing, or an import in it fails.
    """
    if not (project.package / f"{name}.py").is_file():
        raise UserError(f"{_shown(project, name)}: missing; restore it from git")
    if (source := str(project.package.parent)) not in sys.path[:1]:
        sys.path.insert(0, source)  # before another project of the same name that is installed here
    try:
        return import_module(f"{project.name}.{name}")
    except ImportError as error:
        raise imported.failed(project, error) or error from None


def _shown(project: Project, name: str) -> Path:
    return (project.package / f"{name}.py").relative_to(project.root)


def _prepare(project: Project, function: Function) -> Work:
    """What checks the dataset, has the owner's function prepare it, and states what it has written."""

    def prepared(config: Data, out: Path) -> None:
        manifest.require_raw(config)
        folder = Path(config.prepared)
        folder.mkdir(parents=True, exist_ok=True)
        function(config, Path(config.raw), folder)
        manifest.write(folder, requested=config, raw=config.read == "both")

    return prepared


def _train(project: Project, function: Function) -> Work:
    def trained(config: Settings, out: Path) -> None:
        from .run import Run

        with Run(project, config, out) as run:
            function(run)

    return trained


def _evaluate(project: Project, function: Function) -> Work:
    def evaluated(config: Settings, out: Path) -> None:
        from .stage import Stage, alone

        function(Stage(project, config, out, alone(config)))

    return evaluated


STAGES: dict[str, Callable[[Project, Function], Work]] = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
}
LOADED = {"prepare": (), "train": loading.TRAINING, "evaluate": (f"{NAME}.stage",)}  # before the owner's modules
SIGNATURES = {"prepare": "config, raw, folder", "train": "run", "evaluate": "stage"}


def _require_ranks(config: Settings, ranks: int) -> None:
    if ranks > 1 and "RANK" in os.environ:
        raise UserError(f"--ranks {ranks} given to a rank of torchrun; give torchrun --nproc-per-node {ranks} instead")
    if ranks > config.parallel.micro_batches:
        most = f"parallel.micro_batches={config.parallel.micro_batches}"
        raise UserError(f"--ranks {ranks} given, at most {most} wanted: each runs one")


def _start_ranks(config: Settings, overrides: Sequence[str], out: Path, ranks: int) -> NoReturn:
    from .start.ranks import torchrun

    words = [*(word for override in overrides for word in ("--set", override)), "--out", str(out)]
    sys.exit(torchrun(NAME, ["train", *words], ranks, stated_variables(config.options.determinism)))


def call(project: Project, stage: Work, config: Settings, out: Path, only: str = "") -> None:
    """Run a stage; a failure that a user can cause ends it with a line or two and an exit code, not a traceback.

    The stage is given the whole config, or `only` one of its sections: then no other key can change its outcome.
    All generators are seeded before it, so that a stage repeats that draws numbers outside a run.
    """
    try:
        sections = [only, "determinism"] if only else _sections(config)  # `begin` has set its flags
        given = getattr(config, only) if only else config
        with _emptied(given), stages.watched(project, sections, whole=not only, unhashed=config.unhashed.modules):
            seed_everything(derive(0 if only else config.seed, "init"))
            stage(given, out)
            require_held()
    except RunError as failure:
        _end(failure)
    except (OSError, ImportError) as error:  # an import that stands in a function
        failed = of_system(error) if isinstance(error, OSError) else imported.failed(project, error)
        if not failed:
            raise
        _end(failed)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _sections(config: Settings) -> list[str]:
    """The keys of params.yaml whose change asks for another run. Some need not stand there."""
    stated = read_yaml(PARAMS, dict, "Restore it from git") if Path(PARAMS).is_file() else {}
    return [name for name in (*type(config).sections(), *["start"] * bool(config.start.addressed)) if name in stated]


def _emptied(given: Section) -> AbstractContextManager[None]:
    """The folder of the prepared data begins empty where a stage is given the section `data` alone."""
    if not isinstance(given, Data):
        return nullcontext()
    from .guards.emptied import prepared_anew

    return prepared_anew(Path(given.prepared))


def _end(failure: RunError) -> NoReturn:
    failure.report()
    if isinstance(failure, anew.Anew):
        anew.become(failure)
    sys.exit(failure.exit_code)
