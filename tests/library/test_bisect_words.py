"""`repro bisect` refuses what it cannot compare, in a line, before it trains."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from clone import project_in, verb
from conftest import PROJECT
from project import PROJECT as OURS
from project.config import Config
from project.repro.analysis.bisect import sides
from project.repro.analysis.bisect.sides import Named, requested
from project.repro.core.errors import UserError
from project.repro.core.flags import FLAGS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lock lies."""
    monkeypatch.setattr(sides, "FOLDER", tmp_path / "bisect")
    monkeypatch.chdir(PROJECT)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "0 runs, 0 --a and 0 --b seen; name two recorded runs, or "),
        (["artifacts"], "1 runs, 0 --a and 0 --b seen; "),
        (["one", "two", "--a", "seed=1"], "2 runs, 1 --a and 0 --b seen; "),
        (["nowhere", "artifacts"], "nowhere: no such run directory"),
        (["--a", "ranks=0"], "ranks: '0' given, a whole number from 1 to 9999 wanted"),
        (["--a", "ranks="], "ranks: '' given, a whole number"),
        (["--a", "ranks=99"], "ranks=99 given, at most parallel.micro_batches=8 wanted"),
        (["--b", "threads=4"], "OMP_NUM_THREADS=4 is set, 1 is wanted"),
        (["--b", "env.A\x1b[2J=1"], r"'env.A\x1b[2J=1': wanted env.NAME=VALUE"),
        (["--b", "sed=1"], "--set sed: unknown key; did you mean seed?"),
        (["--b", "seed=-1"], "--set seed: -1 given, 0 or more wanted"),
        (["--b", "determinism.relax=[nothing]"], "determinism.relax: unknown flag 'nothing'"),
        (["--commits", "no\x1b", "HEAD"], r"'no\x1b': no such commit in this repository"),
        (["--commits", "HEAD", "HEAD"], "both are commit"),
        (["--b", "seed=1", "--confidence", "nan"], "--confidence nan: a number below 1 wanted"),
        (["--a", "seed=1", "--repeats", "1"], "Invalid value for '--repeats'"),
    ],
)
def test_wrong_words_are_refused(words: Sequence[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [flag.name for flag in FLAGS]:
        monkeypatch.delenv(name, raising=False)
    done = verb("bisect", *words)
    assert done.exit_code == 2 and said in done.output and "Traceback" not in done.output


def test_two_bisects_at_once_are_refused(folder: Path):
    words = Named([], ["seed=1"], [], [], None, False)
    with requested(OURS, Config, words, str), pytest.raises(UserError) as no, requested(OURS, Config, words, str):
        raise AssertionError("both work")
    assert f"{folder / 'bisect'}: another bisect works there" in str(no.value)
    with requested(OURS, Config, words, str) as (_, question):
        assert question.a.config["seed"] == 1


def test_commits_outside_git_are_refused(folder: Path):
    shutil.copytree(PROJECT / "src", folder / "src")
    words = Named([], [], [], [], ("HEAD~1", "HEAD"), False)
    with pytest.raises(UserError, match="no such commit"), requested(project_in(folder), Config, words, str):
        raise AssertionError("it has commits")
