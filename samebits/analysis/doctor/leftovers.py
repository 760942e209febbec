"""Checks of `samebits doctor`: what a starter left behind, and the project as it is now does not use.

The package is read, not run. Where its text leaves open what it writes or reads, nothing is said to be left over.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ...address.address import content_address
from ...address.manifest import require_sound
from ...base.git import GitFailed, git_text
from ...base.text import flatten, some
from ...config.settings import Settings
from ...core.errors import UserError
from ...guards import stages
from ...record import names
from .. import results
from .found import OK, UNKNOWN, WARNING, Context, Found
from .written import Written

RAW = Path("data", "raw")
EXPLAINS = re.compile(r"\.|readme|licen[cs]e|notice|citation|.*\.licen[cs]e\b|.*\.md$", re.IGNORECASE)  # not data
FOLDERS = {names.CHECKPOINTS, names.TRACE, names.LOGGED_FILES, names.EARLIER}  # of a run
COUNTED = {"step", results.STEPS}  # columns that the library writes


def expected(context: Context) -> Found:
    """Whether results.lock expects of this project what a starter gave."""
    project, settings = context.project, context.settings
    if not (project.root / results.RESULTS).is_file():
        return Found(OK, f"no {results.RESULTS}")
    rows = [row for row in results.lock(project)["results"] or [] if row["source"] == results.RELEASED]
    data: dict[str, Any] = {}
    with suppress(UserError):  # a row of its own says that they are missing, or altered
        data = require_sound(settings.data)
    try:
        parts = content_address(project, settings, data).parts if rows else {}
    except UserError as refused:  # as where a package is not installed
        return Found(UNKNOWN, f"the content address is not known: {refused}")
    known = parts.keys() - (set() if data else {"data"})
    differing = sorted({name for row in rows for name in known if row["parts"].get(name) != parts[name]})
    if not differing:
        return Found(OK, f"{results.RESULTS} holds no result of another project")
    seen = f"{results.RESULTS}: the released row is the starter's: this project has another {some(differing)}"
    return Found(WARNING, seen, "remove that row; accept yours after a run: samebits accept artifacts --source WORDS")


def plots(context: Context) -> Found:
    """Whether the plots of dvc.yaml draw what is written."""
    written, stated = Written(context.project), stages.written(context.project)
    drawn, left = stages.drawn(context.project), []
    for name, columns in drawn:
        path = Path(name)
        if name not in stated and path.name not in names.FILES and not written.names_file(path):
            left.append(name)
            continue
        known = COUNTED | (written.logged if path.name == names.CURVES else {None})
        others = [each for each in columns if each not in known and not (None in known and written.names_column(each))]
        left += [f"{each} of {name}" for each in others]
    if left:
        seen = f"nothing in {_package(context)} writes {some(list(dict.fromkeys(left)))}"
        return Found(WARNING, seen, f"remove those plots from {stages.STAGES}, or write what they draw")
    return Found(OK, f"the code writes what the plots of {stages.STAGES} draw ({len(drawn)})")


def keys(context: Context) -> Found:
    """Whether the code reads each key that the config adds to those of the library."""
    written, own = Written(context.project), list(_own(type(context.settings), Settings))
    used = stages.keys(context.project)
    left = [key for key in own if key not in used and not _is_read(key, written)]
    if left and written.reads_whole({section for key in left for section in key.split(".")[:-1]}):
        return Found(UNKNOWN, f"the code may read {some(left)} without naming it")
    if left:
        seen = f"nothing in {_package(context)} reads {some(left)}"
        return Found(WARNING, seen, "remove what is not needed from params.yaml and config.py, or read it")
    return Found(OK, f"the code reads the {len(own)} keys of its own")


def _is_read(key: str, written: Written) -> bool:
    name = key.rpartition(".")[2]
    return name in written.read or written.says(name) or written.says(key)


def _own(kind: type[BaseModel], base: type[BaseModel] | None, before: str = "") -> Iterator[str]:
    """The keys that a config's type adds to another's, as `section.key`."""
    theirs = base.model_fields if base else {}
    for name, field in kind.model_fields.items():
        inner = _section(field.annotation)
        if inner:
            yield from _own(inner, _section(theirs[name].annotation) if name in theirs else None, f"{before}{name}.")
        elif name not in theirs:
            yield before + name


def _section(kind: Any) -> type[BaseModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def raw_files(context: Context) -> Found:
    """Whether a key, the code or dvc.yaml names each dataset that lies in data/raw, or that DVC tracks there."""
    root, written = context.project.root, Written(context.project)
    values = [each for value in flatten(context.settings.model_dump()).values() for each in _texts(value)]
    named = [(root / value).resolve() for value in [*values, *stages.listed(context.project)] if value]
    entries = sorted({path.with_suffix("") if path.suffix == ".dvc" else path for path in (root / RAW).glob("*")})
    left = [
        path.relative_to(root).as_posix()
        for path in entries
        if not EXPLAINS.match(path.name)
        and not any(place.is_relative_to(path.resolve()) or path.resolve().is_relative_to(place) for place in named)
        and not written.names_file(path.relative_to(root))
    ]
    if left:
        pointers = some([f"{path}.dvc" for path in left if (root / f"{path}.dvc").is_file()])
        fix = f"delete what is not needed{f', with {pointers}' if pointers else ''}, or name it: a key such as data.raw"
        return Found(WARNING, f"no key and no code names {some(left)}", fix)
    return Found(OK, f"{RAW}: nothing that no key names")


def _texts(value: object) -> list[str]:
    return [each for each in (value if isinstance(value, tuple | list) else [value]) if isinstance(each, str)]


def artifacts(context: Context) -> Found:
    """Whether git tracks files of a run that neither the code nor the library writes."""
    root, written = context.project.root, Written(context.project)
    stated = stages.written(context.project)
    runs = {Path(name).parent for name in stated if Path(name).name == names.WEIGHTS} - {Path()}
    try:
        tracked = git_text(root, "ls-files", "-z", "--", *map(str, runs)).split("\0") if runs else []
    except GitFailed:
        return Found(OK, "no git here")
    left = [
        name
        for name in filter(None, tracked)
        for inside in [Path(name).relative_to(next(run for run in runs if run in Path(name).parents))]
        if name not in stated and inside.parts[0] not in FOLDERS | names.FILES and not written.names_file(Path(name))
    ]
    if left:
        seen = f"git tracks {some(left)}, and nothing in {_package(context)} writes that"
        return Found(WARNING, seen, f"git rm {' '.join(left[:5])}")
    return Found(OK, f"a run writes what git tracks of it ({len(tracked) - 1 if tracked else 0} files)")


def _package(context: Context) -> str:
    return context.project.package.relative_to(context.project.root).as_posix()
