"""Trainings of other commits, in a work copy below build/: the user's own work tree is never touched."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...address.address import FOLDER, LEFT_BEHIND, digest, is_read, project_files
from ...address.locks import LOCKS
from ...address.manifest import sha256_file
from ...base.files import write_json
from ...base.git import GitFailed, git_text
from ...base.project import VENDORED, Project
from ...base.shape import plain, shown
from ...base.text import flatten, some
from ...config.params import PARAMS
from ...core.errors import RunError, UserError
from ...start import trainings
from ..series import Made, Requested, environment, kept
from ..workcopy import WorkCopy, require_command, work_copy
from .bisect import Verdict
from .suspects import Setup, Side, checked

PLACES = ("data.raw", "data.prepared")  # where the user has the data, not the commit, and which is no suspect
FIRST = "is the first bad commit"
SKIPPED = "There are only 'skip'ped commits left to test."
ONLY_SKIPPED = 2  # the exit code of git bisect with those words
Judge = Callable[[str, Callable[[int], Made]], Verdict]  # of a commit, and who makes its training by the number


@dataclass(frozen=True)
class Commit:
    """A commit, for display."""

    digest: str
    date: str
    subject: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.digest[:12]} ({self.date}) {plain(self.subject)}: {some([plain(name) for name in self.files])}"


def resolve(project: Project, name: str) -> str:
    """The digest of the commit that a name means in the user's repository.

    Raises:
        UserError: there is no such commit.
    """
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    try:
        return git_text(project.root, *words)
    except GitFailed:
        raise UserError(f"{shown(name)}: no such commit in this repository; git log lists those there are") from None


@contextmanager
def cloned(project: Project, folder: Path, places: Mapping[str, Any]) -> Iterator["Clone"]:
    """A work copy of the user's repository below a folder that keeps its trainings; the copy is gone afterwards.

    Raises:
        UserError: the project is in no repository.
    """
    with work_copy(project, folder / "tree", "so there are no commits; git init begins one") as copy:
        yield Clone(copy, project.package.relative_to(project.root), folder, places)


class Clone:
    """The repository's commits, to be trained; `project` lies in the work copy, its `package` as in the user's.

    `folder` keeps the trainings, and `places` are the keys that say where the user has the data.
    """

    def __init__(self, copy: WorkCopy, package: Path, folder: Path, places: Mapping[str, Any]) -> None:
        self.project, self._copy, self._folder, self._places = Project(copy.root / package), copy, folder, places
        # where git has what is named as in the content address, by the beginning of the name
        self._at = {FOLDER: f"{copy.prefix}{VENDORED.as_posix()}/", "": f"{copy.prefix}{package.as_posix()}/"}
        self._prepared = ""  # for what the data there were prepared

    def check_out(self, commit: str, files: Sequence[str] = (), of: str = "") -> None:
        """Have a commit there, with these files of the package or the library `of` another one, and nothing else.

        Raises:
            RunError: git cannot, or the commit holds no library, or one of an older layout.
        """
        self._copy.check_out(commit)
        self._prepared = ""
        if not (self.project.root / VENDORED).is_dir():  # what is removed below would be the library's that runs
            raise RunError(f"commit {commit[:12]}: it has no {self._at[FOLDER].rstrip('/')}")
        require_command(self.project.root, commit)
        for name in files:
            path = self._path(name)
            if self._copy.holds("cat-file", "-e", f"{of}:{path}"):
                self._copy.git("checkout", "--quiet", of, "--", f":(literal){path}")
            else:
                self.project.file(name).unlink(missing_ok=True)

    def _path(self, name: str) -> str:
        """Where git has a file."""
        return next(at + name.removeprefix(begin) for begin, at in self._at.items() if name.startswith(begin))

    def differing(self, a: str, b: str) -> list[str]:
        """The files of package and library, without those that no run reads, in which two commits differ."""
        inside = []
        for begin, at in self._at.items():
            words = ("diff", "--name-only", "--no-renames", "-z", a, b, "--", f":(literal){at}")
            inside += [begin + name.removeprefix(at) for name in self._copy.git(*words).split("\0") if name]
        return sorted(name for name in inside if is_read(name) and not LEFT_BEHIND.search(name))

    def _read(self) -> dict[str, str]:
        """SHA-256 of what a run of the commit may read, whatever its own release counts: its code, its locks."""
        paths = [self.project.file(name) for name in project_files(self.project) if is_read(name)]
        paths += sorted((self.project.root / LOCKS).glob("*.txt"))
        return {path.relative_to(self.project.root).as_posix(): sha256_file(path) for path in paths}

    def side(self, overrides: Sequence[str] = (), ranks: int = 1, variables: Mapping[str, str] | None = None) -> Side:
        """What the commit that is checked out asks for, as its own code reads it.

        Raises:
            RunError: it does not take these overrides.
            UserError: as `checked`.
        """
        read = trainings.config_of(self.project, overrides)
        flat = {key: value for key, value in read["config"].items() if key not in PLACES}
        neutral = flat.keys() - flatten(read["addressed"]).keys() - read["environment"].keys() - {"seed"}
        return checked(Side(flat, frozenset(neutral), ranks, variables or {}, self._copy.git("rev-parse", "HEAD")))

    def make(self, setup: Setup, number: int) -> Made:
        """Train a commit with some files of another one; a training that is kept is not made again.

        Raises:
            RunError: it does not train.
        """
        assert setup.commit and setup.of
        self.check_out(setup.commit, sorted(setup.files), setup.of)
        return self._made(setup, number)

    def _made(self, setup: Setup, number: int) -> Made:
        """The training of what is checked out."""
        config = {**setup.config, **self._places, "data.prepared": str(self.project.root / "data" / "prepared")}
        requested = Requested("bisect", ranks=setup.ranks, variables=setup.variables, number=number)
        wanted = {
            "code": self._read(), "config": config, "ranks": setup.ranks,
            "variables": dict(setup.variables), "number": number,
        }  # fmt: skip

        def train(run: Path) -> None:
            write_json(self.project.root / PARAMS, _nested(config))  # JSON is YAML
            data = digest({key: wanted[key] for key in ("code", "config")})
            if data != self._prepared:
                trainings.run(self.project, trainings.command("prepare", {}))
                self._prepared = data
            words = trainings.command("train", {}, "--out", run, ranks=setup.ranks)
            trainings.run(self.project, words, environ=environment(self.project, requested))

        return kept(self._folder / digest(wanted)[:16], requested, wanted, train)[0]

    def first_bad(self, setup: Setup, good: str, bad: str, files: Sequence[str], trial: Judge) -> list[Commit]:
        """The first commit from which on trials differ, by git bisect; several where it cannot tell them apart.

        Each is trained with the keys of `setup` that its own code knows.

        Raises:
            UserError: `good` does not come before `bad`.
        """
        if not self._copy.holds("merge-base", "--is-ancestor", good, bad):
            raise UserError(
                f"commit {good[:12]} does not come before {bad[:12]}, so no commit between them is searched for"
            )

        def make(number: int) -> Made:
            own = self.side().config
            config = {key: setup.config.get(key, value) for key, value in own.items()}
            return self._made(replace(setup, config=config), number)

        words = {Verdict.EQUAL: "good", Verdict.DIFFERS: "bad", Verdict.UNRESOLVED: "skip"}
        paths = [f":(literal){self._path(name)}" for name in files]
        self.check_out(bad)
        said = self._copy.git("bisect", "start", bad, good, "--", *paths)
        while FIRST not in said and SKIPPED not in said:
            word = words[trial(self._copy.git("rev-parse", "HEAD"), make)]
            self.check_out("HEAD")  # params.yaml was written there
            said = self._copy.git("bisect", word, ends=(0, ONLY_SKIPPED))
        if FIRST in said:
            found = [said.partition(FIRST)[0].split()[-1]]
        else:
            found = [line for line in said.split("\n") if len(line) == 40 and line.isalnum()]
        return [self._reported(commit) for commit in found]

    def _reported(self, commit: str) -> Commit:
        words = ("show", "--no-show-signature", "--name-only", "--no-renames", "-m", "--first-parent", "-z")
        date_and_subject, *names = self._copy.git(*words, "--format=%aI%n%s", commit).split("\0")
        date, _, subject = date_and_subject.partition("\n")
        return Commit(commit, date, subject.strip("\n"), tuple(name.strip("\n") for name in names if name.strip("\n")))


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in config.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return tree
