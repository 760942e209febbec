"""Trainings of other commits, in a clone of the repository below build/: the user's own work tree is never touched."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...address.address import LEFT_BEHIND, OUTSIDE_THE_RUN, code, digest, locks
from ...base.files import write_json
from ...base.git import GitFailed, git, is_repository
from ...base.project import Project
from ...base.shape import plain, shown
from ...base.text import flatten, some
from ...config.params import PARAMS
from ...core.errors import Failure, Refused
from ...start import trainings
from ..series import Asked, Made, environment, kept
from .bisect import Verdict
from .suspects import Setup, Side

PLACES = ("data.raw", "data.prepared")  # where the user has the data, not the commit
# Prints the config of a commit and the kinds of its keys, as its own code reads them.
READ = """
import json, sys
from {package}.config import Config
from {package}.repro.config.params import load
config = load(Config, overrides=sys.argv[1:])
print(json.dumps([config.flat(), config.addressed(), config.environment()]))
"""
FIRST = "is the first bad commit"
SKIPPED = "There are only 'skip'ped commits left to test."
# Of each command in the clone: no hook of anybody runs, and no other repository is taken for it.
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "advice.detachedHead=false")


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
        Refused: there is no such commit.
    """
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    try:
        return git(project.root, *words).decode().strip()
    except GitFailed:
        raise Refused(f"{shown(name)}: no such commit in this repository; git log lists those there are") from None


class There:
    """Trainings of commits; `places` are the keys that say where the user has the data."""

    def __init__(self, clone: "Clone", folder: Path, places: Mapping[str, Any]) -> None:
        self._clone, self._folder, self._places = clone, folder, places

    def make(self, setup: Setup, number: int) -> Made:
        """Train a commit with some files of another one."""
        if setup.commit is None or setup.of is None:
            raise ValueError("a setup of no commit")
        self._clone.check_out(setup.commit, sorted(setup.files), setup.of)
        return self._clone.make(setup, number, self._folder, self._places)

    def first_bad(
        self,
        setup: Setup,
        good: str,
        bad: str,
        files: Sequence[str],
        trial: Callable[[str, Callable[[int], Made]], Verdict],
    ) -> list["Commit"]:
        """The first commit from which on trials differ; each has the keys of `setup` that its own code knows."""

        def make(number: int) -> Made:
            own = self._clone.side().config
            config = {key: setup.config.get(key, value) for key, value in own.items()}
            return self._clone.make(replace(setup, config=config), number, self._folder, self._places)

        return self._clone.first_bad(good, bad, files, lambda commit: trial(commit, make))


@contextmanager
def cloned(project: Project, folder: Path) -> Iterator["Clone"]:
    """A clone of the user's repository in a folder, which is gone afterwards.

    Raises:
        Refused: the project is in no repository.
    """
    if not is_repository(project.root):
        raise Refused(f"{project.root}: no git repository, so there are no commits; git init begins one")
    place = _run(project.root, "rev-parse", "--show-toplevel", "--show-prefix")
    top, prefix = place.stdout.split("\n")[:2]
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by one that was killed
        folder.parent.mkdir(parents=True, exist_ok=True)
        done = _run(
            folder.parent,
            *QUIET,
            "clone",
            "--quiet",
            "--shared",
            "--no-checkout",
            "--template=",
            "--",
            top,
            str(folder),
        )
        if done.returncode:
            raise Failure(f"{folder}: git cannot clone the repository: {' '.join(done.stderr.split())}")
        package = folder / prefix / project.package.relative_to(project.root)
        yield Clone(folder, Project(package), project, prefix)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Clone:
    """The repository's commits, to be trained: `project` lies in it, `own` is the user's."""

    def __init__(self, top: Path, project: Project, own: Project, prefix: str) -> None:
        self.top, self.project, self.own = top, project, own
        self._package = f"{prefix}{project.package.relative_to(project.root).as_posix()}"
        self._prepared = ""  # for what the data there were prepared

    def check_out(self, commit: str, files: Sequence[str] = (), of: str = "") -> None:
        """Have a commit there, with these files of the package `of` another one, and nothing else.

        Raises:
            Failure: git cannot, or the commit has no such package.
        """
        self._git("checkout", "--quiet", "--force", "--detach", commit)
        self._clean()
        for name in files:
            path = f"{self._package}/{name}"
            if self._git("cat-file", "-e", f"{of}:{path}", check=False).returncode:
                (self.project.package / name).unlink(missing_ok=True)
            else:
                self._git("checkout", "--quiet", of, "--", f":(literal){path}")
        if not self.project.machinery.is_dir():
            raise Failure(f"commit {commit[:12]}: it has no {self._package}/repro")

    def _clean(self) -> None:
        self._git("clean", "--quiet", "-ffdx")  # bytecode too: a file of the same size and second would be taken for it
        self._prepared = ""

    def differing(self, a: str, b: str) -> list[str]:
        """The files of the package, without those that no run reads, in which two commits differ."""
        listed = self._git("diff", "--name-only", "--no-renames", "-z", a, b, "--", f":(literal){self._package}").stdout
        inside = [name.removeprefix(f"{self._package}/") for name in listed.split("\0") if name]
        outside = tuple(each for each in OUTSIDE_THE_RUN if each.endswith("/"))
        return [
            name
            for name in inside
            if name not in OUTSIDE_THE_RUN and not name.startswith(outside) and not LEFT_BEHIND.search(name)
        ]

    def side(self, overrides: Sequence[str] = (), ranks: int = 1, variables: Mapping[str, str] | None = None) -> Side:
        """What the commit that is checked out asks for, as its own code reads it.

        Raises:
            Failure: it does not take these overrides.
        """
        words = [sys.executable, "-c", READ.format(package=self.project.name), *overrides]
        flat, addressed, environ = json.loads(trainings.run(self.project, words))
        neutral = flat.keys() - flatten(addressed).keys() - environ.keys() - {"seed"}
        return Side(flat, frozenset(neutral), ranks, variables or {}, self._git("rev-parse", "HEAD").stdout.strip())

    def make(self, setup: Setup, number: int, folder: Path, places: Mapping[str, Any]) -> Made:
        """Train what is checked out; a training that is kept in `folder` is not made again.

        Raises:
            Failure: it does not train.
        """
        config = {**setup.config, **places, "data.prepared": str(self.project.root / "data" / "prepared")}
        asked = Asked("bisect", ranks=setup.ranks, variables=setup.variables, number=number)
        wanted = {
            "code": code(self.project), "lock": locks(self.project), "config": config, "ranks": setup.ranks,
            "variables": dict(setup.variables), "number": number,
        }  # fmt: skip

        def train(run: Path) -> None:
            write_json(self.project.root / PARAMS, _nested(config))  # JSON is YAML
            data = digest({key: wanted[key] for key in ("code", "config")})
            if data != self._prepared:
                trainings.run(self.project, trainings.command(self.project, ".prepare", {}))
                self._prepared = data
            words = trainings.command(self.project, ".train", {}, "--out", run, ranks=setup.ranks)
            trainings.run(self.project, words, environ=environment(self.project, asked))

        return kept(folder / digest(wanted)[:16], asked, wanted, train)[0]

    def first_bad(self, good: str, bad: str, files: Sequence[str], trial: Callable[[str], Verdict]) -> list[Commit]:
        """The first commit from which on trials differ, by git bisect; several where it cannot tell them apart.

        Raises:
            Refused: `good` does not come before `bad`.
        """
        if self._git("merge-base", "--is-ancestor", good, bad, check=False).returncode:
            raise Refused(
                f"commit {good[:12]} does not come before {bad[:12]}, so no commit between them is searched for"
            )
        words = {Verdict.EQUAL: "good", Verdict.DIFFERS: "bad", Verdict.UNRESOLVED: "skip"}
        paths = [f":(literal){self._package}/{name}" for name in files]
        self._git("checkout", "--quiet", "--force", "--detach", bad)
        self._clean()
        said = self._git("bisect", "start", bad, good, "--", *paths).stdout
        while FIRST not in said and SKIPPED not in said:
            word = words[trial(self._git("rev-parse", "HEAD").stdout.strip())]
            self._git("checkout", "--quiet", "--force", "HEAD", "--", ".")  # params.yaml was written there
            self._clean()
            done = self._git("bisect", word, check=False)
            said = done.stdout
            if done.returncode and SKIPPED not in said:
                raise Failure(f"git bisect {word}: {' '.join((done.stderr or said).split())}")
        if FIRST in said:
            found = [said.partition(FIRST)[0].split()[-1]]
        else:
            found = [line for line in said.split("\n") if len(line) == 40 and line.isalnum()]
        return [self._told(commit) for commit in found]

    def _told(self, commit: str) -> Commit:
        words = ("show", "--no-show-signature", "--name-only", "--no-renames", "-m", "--first-parent", "-z")
        date_and_subject, *names = self._git(*words, "--format=%aI%n%s", commit).stdout.split("\0")
        date, _, subject = date_and_subject.partition("\n")
        return Commit(commit, date, subject.strip("\n"), tuple(name.strip("\n") for name in names if name.strip("\n")))

    def _git(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        # both named: without its own .git, git would look for one in the folders above, which is the user's
        done = _run(self.top, *QUIET, f"--git-dir={self.top / '.git'}", f"--work-tree={self.top}", *words)
        if check and done.returncode:
            raise Failure(f"git {words[0]}: {' '.join((done.stderr or done.stdout).split())}")
        return done


def _run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ = kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    return subprocess.run(
        ["git", *words], cwd=folder, env=environ, capture_output=True, text=True, errors="surrogateescape"
    )


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in config.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return tree
