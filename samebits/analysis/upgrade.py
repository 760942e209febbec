"""Another release of the library in vendor/: proved on the owner's model, and taken back where that fails.

While this works, build/upgrade holds what it replaces. After a kill git has it: only what is committed is replaced.
"""

import io
import json
import re
import shutil
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..address.address import CORE, address_differences, code, core_stated
from ..address.locks import LOCKS, normal
from ..address.pins import REQUESTED
from ..address.release import library, library_in
from ..base.files import durable, exchange, read_text
from ..base.git import GitFailed, git, git_text, is_repository
from ..base.project import NAME, SETTINGS, VENDORED, Project, version_of
from ..base.text import Difference, short, some
from ..core.arithmetic import description
from ..core.errors import RunError, UserError
from ..start import trainings

Report = Callable[[str], None]
CHECKOUT = "{{cookiecutter.project}}"  # a folder that the template's repository alone has
STATED = re.compile(r'^template = "[^"]*"$', re.MULTILINE)  # in pyproject.toml: the release of the library
TRAIN, RUN = "dependencies", "run"  # the lists in pyproject.toml that hold what the library asks for
REPLACED = str(VENDORED), SETTINGS, LOCKS
FROM = "make upgrade FROM=../repro-template"
MAKE = "make", "--no-print-directory"


@dataclass(frozen=True)
class Release:
    """A library to take.

    Attributes:
        folder: where it lies.
        version: as it states it.
        ranges: what it asks for, as the list in pyproject.toml, then the requirement; empty where only a checkout
            of the template says so, and this is none.
    """

    folder: Path
    version: str
    ranges: tuple[tuple[str, str], ...]


@contextmanager
def checked_out(source: Path) -> Iterator[Path]:
    """The folder to take a library from: a path, or for PATH@REF what a commit of the repository at PATH holds.

    Raises:
        UserError: no such repository or commit.
    """
    path, at, ref = str(source).rpartition("@")
    if not at or source.exists():
        yield source
        return
    try:
        if not Path(path).is_dir():
            raise GitFailed(f"no folder {path}")
        archive = git(Path(path), "archive", "--format=tar", "--end-of-options", f"{ref}^{{tree}}", own=True)
    except GitFailed as failed:
        raise UserError(f"{source}: {failed}; a commit or tag of the repository in {path} wanted") from None
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)  # from 3.11.4
            files.extractall(folder)
        yield Path(folder)


def release(source: Path, shown: Path) -> Release:
    """The library in a checkout of the template's repository, in a project, or in its own folder.

    Raises:
        UserError: none is there; it names the place as `shown`.
    """
    for folder in (source / NAME, source / VENDORED, source):
        if (folder / "__init__.py").is_file() and (folder / CORE).is_dir():
            return Release(folder, version_of(folder), tuple(_ranges(source)))
    raise UserError(f"{shown}: no {NAME} seen, a checkout of the template's repository wanted, or a project: {FROM}")


def _ranges(source: Path) -> Iterator[tuple[str, str]]:
    if (source / CHECKOUT).is_dir():
        stated = tomllib.loads(read_text(source / SETTINGS))["project"]
        yield from ((TRAIN, each) for each in stated["dependencies"])
        yield from ((RUN, each) for lines in stated["optional-dependencies"].values() for each in lines)


def upgrade(project: Project, source: Path, only: Sequence[str], force: bool, report: Report) -> None:
    """Replace the project's library by that at `source`, a path or PATH@REF, and verify its model with the new one.

    `only` names the ways of `verify` to try; `force` gives up what was modified in the library.

    Raises:
        UserError: the project has no library of its own; none is at `source`; or what would be replaced is in no
            commit, or modified.
        RunError: a step failed, and everything is as before.
    """
    if not project.has_library:
        raise UserError(f"{VENDORED}: missing; the library is installed, so upgrade it as you installed it")
    with checked_out(source) as folder:
        _upgrade(project, release(folder, source), source, only, force, report)


def _upgrade(project: Project, new: Release, source: Path, only: Sequence[str], force: bool, report: Report) -> None:
    if new.folder.resolve() == project.library.resolve():
        raise UserError(f"{source}: this project's own library, that of another release wanted: {FROM}")
    before, after = library(project), library_in(new.folder, new.version)
    if before.digest == after.digest:
        return report(f"{VENDORED} is the library in {source} already: nothing to do")
    _require_kept(project, before.modified, force)
    if after.modified:
        report(f"{source}: modified since its release, as each receipt will say: {some(after.modified)}")
    report(f"library: {before.template} -> {after.template}")
    try:
        recorded = _address(project)
    except trainings.Ended as ended:  # as with a key in params.yaml that the new release alone knows
        report(f"the project does not start with its library as it is, so only core is compared: {_last(ended)}")
        recorded = {"preimage": {"core": core_stated(project, code(project))}}
    with _or_as_before(project, report) as kept:
        shutil.copytree(new.folder, kept / NAME, ignore=shutil.ignore_patterns("__pycache__"))
        exchange(kept / NAME, project.root / VENDORED)
        if _merged(project, new, report):
            _do(project, "the locks", [*MAKE, "lock"])
            _do(project, "the environment", [*MAKE, "environment"])
        report(_compared(recorded, _address(project)))
        ways = [word for name in only for word in ("--only", name)]
        _do(project, "samebits verify", trainings.command("verify", {}, *ways))
    report(f"upgraded; commit it: git add {' '.join(REPLACED)} && git commit -m 'samebits {new.version}'")


def _require_kept(project: Project, modified: Sequence[str], force: bool) -> None:
    """Refuse to replace what git could not bring back.

    Raises:
        UserError: the library is modified; or something has no commit.
    """
    root = project.root
    if not is_repository(root, own=True):
        raise UserError(f"{root}: no git repository, which keeps the release of before; git init begins one")
    if changed := git_text(root, "status", "--porcelain", "-uall", "--", *REPLACED, own=True).splitlines():
        raise UserError(
            f"{some([line[3:] for line in changed])}: in no commit as it is now, and upgrade would replace it. "
            f"Commit it, or put it back: git restore --staged --worktree {' '.join(REPLACED)}"
        )
    if modified and not force:
        raise UserError(
            f"{VENDORED}: modified since its release: {some(modified)}. To give that up (git keeps it): "
            f"samebits upgrade --force"
        )


@contextmanager
def _or_as_before(project: Project, report: Report) -> Iterator[Path]:
    """A folder beside, for the library that is exchanged; after a failure, all that was replaced is put back.

    Raises:
        RunError: the failure.
    """
    beside, library = project.root / "build" / "upgrade", project.root / VENDORED
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    before, inode = _contents(project), library.stat().st_ino
    try:
        yield beside
    except BaseException as failure:
        if library.stat().st_ino != inode:
            exchange(beside / NAME, library)
        for path, content in {**dict.fromkeys(now := _contents(project)), **before}.items():
            if content is None:  # it is new
                path.unlink()
            elif content != now.get(path):
                _write(path, content)
        locks = [path for path in now | before if now.get(path) != before.get(path) and path.suffix == ".txt"]
        shutil.rmtree(beside)
        then = "; the environment: make setup" if locks else ""
        report(f"put back as before: {', '.join(REPLACED)}{then}")
        if isinstance(failure, trainings.Ended):
            raise RunError(f"not upgraded: {_last(failure)}") from None
        if isinstance(failure, RunError | OSError):
            raise RunError(f"not upgraded: {failure}") from None
        raise
    shutil.rmtree(beside)


def _contents(project: Project) -> dict[Path, bytes]:
    """What else may be replaced."""
    paths = [project.root / SETTINGS, *(project.root / LOCKS).rglob("*")]
    return {path: path.read_bytes() for path in paths if path.is_file() and "__pycache__" not in path.parts}


def _write(path: Path, content: bytes) -> None:
    with durable(path) as beside:
        beside.write_bytes(content)
        shutil.copymode(path, beside) if path.exists() else None


def _merged(project: Project, new: Release, report: Report) -> bool:
    """Write the release and what it asks for into pyproject.toml; say whether it asks for other packages than before.

    What the owner added stays, and so do extras that the owner wants of a package.

    Raises:
        RunError: pyproject.toml has a form that this cannot change.
    """
    path = project.root / SETTINGS
    text = STATED.sub(f'template = "{new.version}"', read_text(path), count=1)
    own, lines = _requested(text), []
    for group, wanted in new.ranges:
        name, versions = _name_and_versions(wanted)
        line = own.get(name, "")
        if line and _name_and_versions(line)[1] == versions:
            continue
        if line:
            seen = REQUESTED.fullmatch(line)
            new_line = f"{seen[1]}[{seen[2]}]{versions}" if seen and seen[2] else wanted
            text = text.replace(f'"{line}"', f'"{new_line}"')
        else:
            text = re.sub(rf"(?m)^{group} = \[.*$", rf'\g<0>\n    "{wanted}",', text, count=1)
        if _name_and_versions(_requested(text).get(name, ""))[1] != versions:
            raise RunError(f"{SETTINGS}: {line or group} cannot be changed here; write {wanted} there, then commit it")
        lines.append(f"{SETTINGS}: {line or 'nothing'} -> {wanted}")
    _write(path, text.encode())
    report("\n".join(lines or [f"{SETTINGS}: the packages that it asks for stay as they are"]))
    return bool(lines)


def _requested(text: str) -> dict[str, str]:
    """What a pyproject.toml of this text asks for, by name."""
    stated = tomllib.loads(text)["project"]
    lists = [stated[TRAIN], *stated.get("optional-dependencies", {}).values()]
    return {_name_and_versions(line)[0]: line for lines in lists for line in lines}


def _name_and_versions(line: str) -> tuple[str, str]:
    found = REQUESTED.fullmatch(line)
    return (normal(found[1]), "".join(found[3].split())) if found else ("", "")


def _do(project: Project, what: str, words: Sequence[str]) -> None:
    """Run a command that prints what it does.

    Raises:
        RunError: it failed.
    """
    if code := trainings.shown(project, words):
        raise RunError(f"{what} ended with exit code {code}")


def _address(project: Project) -> dict[str, Any]:
    """Return what `samebits address` prints with the library in vendor/; prepare data that are missing.

    Raises:
        Ended: that library does not start, or refuses the config.
    """
    words = trainings.command("address", {})
    try:
        said = trainings.run(project, words)
    except trainings.Ended:
        trainings.run(project, trainings.command("prepare", {}))
        said = trainings.run(project, words)
    record: dict[str, Any] = json.loads(said)
    return record


def _last(ended: trainings.Ended) -> str:
    """The line in which a command says why it failed."""
    return ended.said[-1] if ended.said else str(ended)


def _compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return a line that says whether earlier results stay valid, from address records before and after.

    If only core is known of `before`, only core is compared.
    """
    core = description(after["preimage"]["core"])
    is_complete = "config" in before["preimage"]
    if not is_complete:
        after = {"preimage": {"core": after["preimage"]["core"]}}
        differing = [] if before == after else [Difference("core", description(before["preimage"]["core"]), core)]
    else:
        differing = address_differences(before, after)
    if not differing and is_complete:
        return f"the content address stays the same (core: {core}): results stay valid, unfinished runs resume"
    if not differing:
        return f"core stays the same ({core}); samebits check says whether results stay valid"
    changes = some([f"{d.field}: {short(d.one)} -> {short(d.other)}" for d in differing])
    return (
        f"the content address changes ({changes}). Earlier results and unfinished runs are stale; "
        f"samebits replay RECEIPT repeats such a result with the library of its commit"
    )
