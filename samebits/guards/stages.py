"""What a stage uses must be known to DVC, which runs it again after a change, and to the content address.

dvc.yaml lists files and keys by hand. A stage is held to that list, and to the modules that it has really loaded:
before it begins, and again when it ends.
"""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..address import release
from ..address.address import CORE, FOLDER, OUTSIDE_THE_RUN, addressed, code, core_stated, locks
from ..address.loaded import require_kept, require_unchanged
from ..address.locks import LOCKS, is_below, require_installed, resolved, split
from ..base.files import read_text
from ..base.forms import ABSENT, Form
from ..base.project import VENDORED, Project
from ..base.text import differences, flatten, some
from ..config.params import PARAMS
from ..config.yaml_file import read_yaml
from ..core import arithmetic
from ..core.errors import UserError
from . import opened

STAGES = "dvc.yaml"
REMEDY = f"Mend it, or restore it: git checkout {STAGES}"
VARIABLE = "DVC_STAGE"  # DVC sets it for the commands that it runs
COMMAND = "cli.py"  # which starts each stage
KEY = re.compile(r"\$\{([\w.]+)\}")  # of params.yaml, in a path
Items = list[str | dict[str, Any]]
ASIDE = ("tests/", f"{LOCKS}/")  # a test may run a stage in its own process, which has loaded these


class Entry(Form):
    """What a stage reads and writes."""

    params: Items = ABSENT
    deps: Items = ABSENT
    outs: Items = ABSENT
    metrics: Items = ABSENT
    plots: Items = ABSENT


class Repeated(Entry):
    """A stage, or one that is made for each of several values."""

    do: Entry = ABSENT


class Stages(Form):
    """What dvc.yaml holds."""

    stages: dict[str, Repeated]


@dataclass(frozen=True)
class Stage:
    """A stage of dvc.yaml: its name, and the keys and paths that it depends on."""

    name: str
    params: tuple[str, ...]
    deps: tuple[str, ...]

    def lists(self, path: str) -> bool:
        """Whether a path, named from the project's root, is a dependency or lies in one."""
        return any(path == listed or path.startswith(f"{listed}/") for listed in self.deps)

    def require(self, part: str, missing: Sequence[str]) -> None:
        """Refuse the stage where a part of its entry lacks something."""
        if missing:
            raise UserError(
                f"{STAGES}: {part} of stage {self.name} lack {some(missing)}: a change there would not run it again. "
                f"Add {'them' if len(missing) > 1 else 'it'} and repeat: dvc repro"
            )


_files: list[Callable[[], None]] = []  # of the stage that runs
_left_out: set[Path] = set()  # files of modules


@contextmanager
def watched(project: Project, sections: Sequence[str], whole: bool, unhashed: Sequence[str] = ()) -> Iterator[None]:
    """Hold the stage that runs inside to what it says that it uses.

    `sections` are the top-level keys that it is given; `whole` says that this is the whole config. Then it is a run
    or reads one, and must list the whole package and the locks of what a training loads. `unhashed` top-level modules
    may come from anywhere.

    Raises:
        UserError: it loaded a module or opened a file of the project that the content address lacks, or loaded a module
            from elsewhere; or a file of the package that is no source changed while it ran. Or, under DVC, its entry
            in dvc.yaml lacks something, or something that the entry lists changed while the stage ran.
    """
    stage = _running(project)
    if stage:
        stage.require("params", [section for section in sections if section not in stage.params])
    files = partial(_require_files, project, stage, whole, unhashed)
    files()
    require_unchanged(project)
    before = _state(project, stage)

    def still() -> None:
        files()
        require_kept(project)

    place = len(_files)
    _files.append(still)
    try:
        yield
        require_still()
    finally:
        del _files[place:]
    changed = [difference.field for difference in differences(before, _state(project, stage))]
    if stage and changed:
        raise UserError(
            f"{some(changed)}: changed while stage {stage.name} ran. DVC would take that for the state that was used. "
            f"Undo it and record the outcome with: dvc commit {stage.name}. Or repeat: dvc repro"
        )


def hold(check: Callable[[], None]) -> None:
    """Have the stage that runs, if any, do this check as well when it ends."""
    if _files:
        _files.append(check)


def require_still() -> None:
    """Re-check the dependencies of the stage that runs, if any, before a run's results are written."""
    for files in _files:
        files()


def outputs(project: Project) -> list[Path]:
    """The paths that the stages of dvc.yaml write, and those that its plots draw."""
    return [project.root / name for name in [*written(project), *(name for name, _ in drawn(project))]]


def written(project: Project) -> list[str]:
    """The paths that the stages of dvc.yaml write, as they stand there."""
    stages = [stage.get("do", stage) for stage in _pipeline(project)["stages"].values()]
    items = [item for stage in stages for part in ("outs", "metrics", "plots") for item in stage.get(part, ())]
    return [item if isinstance(item, str) else next(iter(item), "") for item in items]


def drawn(project: Project) -> list[tuple[str, list[str]]]:
    """The files that the plots of dvc.yaml draw, each with its columns; those with a `y` that maps files to columns."""
    plots, found = _pipeline(project).get("plots"), []
    for plot in [each for each in (plots if isinstance(plots, list) else []) if isinstance(each, dict)]:
        for axes in [each for each in plot.values() if isinstance(each, dict) and isinstance(each.get("y"), dict)]:
            for file, columns in axes["y"].items():
                listed = [*(columns if isinstance(columns, list) else [columns]), axes.get("x")]
                found.append((str(file), [each for each in listed if isinstance(each, str)]))
    return found


def listed(project: Project) -> list[str]:
    """The paths that the stages of dvc.yaml depend on, as they stand there."""
    stages = [stage.get("do", stage) for stage in _pipeline(project)["stages"].values()]
    return [item for stage in stages for item in stage.get("deps", ()) if isinstance(item, str)]


def keys(project: Project) -> set[str]:
    """The keys of params.yaml that dvc.yaml puts in, as `section.key`."""
    path = project.root / STAGES
    return set(KEY.findall(read_text(path, REMEDY))) if path.is_file() else set()


def leave_out(folder: Path) -> None:
    """The modules in a folder that are loaded by now are those of who watches the stage, which does without them."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # a lazy module would load what it stands for
        if file and file.startswith(f"{folder}{os.sep}"):
            _left_out.add(Path(file))


def _require_files(project: Project, stage: Stage | None, whole: bool, unhashed: Sequence[str]) -> None:
    """Refuse loaded modules and opened files that the content address lacks; under DVC, also those not listed."""
    require_installed(project, unhashed)
    package, loaded = _package(project), _loaded(project)
    known = [project.shown(name) for name in addressed(project)]
    ours = release.released(project)  # of the library; empty where the list is lost, as a receipt says
    unknown = sorted(path for path in loaded - {*known} if not _of_library(path, ours))
    if unknown:
        raise UserError(
            f"{some(unknown)}: loaded, but not in the content address: a change there would go unseen. "
            f"Move it into {package}"
        )
    if whole:
        opened.require_known()
    if stage:
        package_files = [project.shown(name) for name in addressed(project) if not name.startswith(FOLDER)]
        # Nothing shows which of the files that are not Python a stage reads, so it must list them all.
        used = [*(name for name in package_files if name in loaded or not name.endswith(".py")), *opened.unknown()]
        used = [package, *(f"{LOCKS}/{name}" for name in locks(project))] if whole else used
        stage.require("deps", [name for name in [*used, *core_dependency(project)] if not stage.lists(name)])


def core_dependency(project: Project) -> list[str]:
    """Return the path of the project's core that each stage must list; none if a lock names the library.

    It is the file with the version of the arithmetic, or the whole folder once somebody has edited core.
    """
    is_edited = arithmetic.is_edited(core_stated(project, code(project)))
    path = project.shown(FOLDER + CORE) if is_edited else project.shown(FOLDER + CORE + arithmetic.FILE)
    return [path] if project.has_library else []


def core_unlisted(project: Project) -> list[str]:
    """Return a sentence if core is edited and stages of dvc.yaml depend on its arithmetic only; else nothing."""
    for folder in core_dependency(project):
        file = f"{folder}/{arithmetic.FILE}"
        if file in listed(project):
            return [f"{folder} is edited, and DVC does not see it: in {STAGES}, replace {file} with {folder}"]
    return []


def _of_library(path: str, released: Collection[str]) -> bool:
    """Whether a file, named from the root, is the library's own, which a run loads although it decides no bit.

    A file that somebody has added to the library is not: nobody knows what it decides.
    """
    folder = f"{VENDORED.as_posix()}/"
    if not path.startswith(folder):
        return False
    name = path.removeprefix(folder)
    return name == COMMAND or (not name.startswith(OUTSIDE_THE_RUN) and (not released or name in released))


def _loaded(project: Project) -> set[str]:
    """The files below the project's root that modules came from, named from there."""
    named = {split(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    root, environment = resolved(str(project.root)), resolved(sys.prefix)
    folders = {folder: resolved(folder) for folder in {folder for folder, _ in named}}  # few, for many modules
    ours = {
        folder: Path(place).relative_to(root).as_posix()
        for folder, place in folders.items()
        if is_below(place, root) and not is_below(place, environment)
    }
    # a file that is a link keeps its name; torch names files that do not exist
    files = [(folder, name) for folder, name in named if folder in ours and Path(folder, name).is_file()]
    names = {Path(ours[folder], name).as_posix() for folder, name in files if Path(folder, name) not in _left_out}
    return {name for name in names if not name.startswith(ASIDE)}


def _state(project: Project, stage: Stage | None) -> dict[str, Any]:
    """The files and keys that a stage lists, as they are now; of files their digests."""
    if stage is None:
        return {}
    files = {project.shown(name): sha256 for name, sha256 in code(project).items()}
    files |= {f"{LOCKS}/{name}": sha256 for name, sha256 in locks(project).items()}
    keys = flatten({name: value for name, value in _params(project).items() if name in stage.params})
    return {name: sha256 for name, sha256 in files.items() if stage.lists(name)} | keys


def _package(project: Project) -> str:
    return project.package.relative_to(project.root).as_posix()


def _running(project: Project) -> Stage | None:
    """The stage of dvc.yaml that DVC runs now; None without DVC."""
    name = os.environ.get(VARIABLE, "").partition("@")[0].rpartition(":")[2]  # of file:stage@item
    entry = _pipeline(project)["stages"].get(name) if name else None
    if entry is None:
        return None
    entry = entry.get("do", entry)  # of `foreach`
    params, deps = ([item for item in entry.get(part, ()) if isinstance(item, str)] for part in ("params", "deps"))
    keys = flatten(_params(project))
    deps = [KEY.sub(lambda key: str(keys.get(key[1], key[0])), path) for path in deps]
    return Stage(name, tuple(params), tuple(map(os.path.normpath, deps)))


def _pipeline(project: Project) -> dict[str, Any]:
    """What dvc.yaml holds; no stage without that file."""
    path = project.root / STAGES
    return read_yaml(path, Stages, REMEDY) if path.is_file() else {"stages": {}}


def _params(project: Project) -> dict[str, Any]:
    return read_yaml(project.root / PARAMS, dict, "It changed while the stage ran: restore it and repeat: dvc repro")
