"""`samebits bisect`: planted causes are named, exactly those, innocent differences are not, wrong words are refused."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clone import Forked, commit, copied, edit, project_in, verb
from handmade import traced, write
from project.config import Config
from support import OURS, PACKAGE, PROJECT
from test_replay import state

from samebits.analysis.bisect import cause, sides
from samebits.analysis.bisect.cause import EQUAL, FOUND, NOT_FOUND, Answer, bisected
from samebits.analysis.bisect.commits import cloned
from samebits.analysis.bisect.sides import Named, Question, requested
from samebits.analysis.bisect.suspects import Setup, side, split
from samebits.analysis.series import Made, Requested
from samebits.base.project import Project
from samebits.config.params import load
from samebits.core.errors import RunError, UserError
from samebits.core.flags import FLAGS
from samebits.record.receipt import read
from samebits.start import trainings

SMALL = ("train.epochs=1", "model.width=8", "model.depth=1", "parallel.global_batch=256")
INNOCENT = ("loader.workers=1", "checkpoint.every=3", "train.evaluate_every=1", "integrity.compare_every=2")
ZEROS = "0" * 64


@dataclass
class Bisect:
    """Bisects with forked trainings, which are kept for all tests; what the last reported, and how many it trained."""

    folder: Path
    common: tuple[str, ...]
    run: Forked
    message: list[str] = field(default_factory=list)

    def __call__(
        self, a: Sequence[str] = (), b: Sequence[str] = (), project: Project = OURS,
        runs: Sequence[str] = (), commits: tuple[str, str] | None = None,
    ) -> Answer:  # fmt: skip
        self.message, self.run.trained = [], 0
        named = Named(runs, a, b, self.common, commits, False)
        with requested(project, Config, named, lambda: "") as (maker, question):
            return bisected(maker, question, self.message.append)


@pytest.fixture(scope="module")
def kept(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Bisect:
    folder = tmp_path_factory.mktemp("bisect")
    return Bisect(folder, (*SMALL, f"data.prepared={prepared}"), Forked(folder))


@pytest.fixture
def bisect(kept: Bisect, monkeypatch: pytest.MonkeyPatch) -> Bisect:
    monkeypatch.setattr(trainings, "run", kept.run)
    monkeypatch.setattr(sides, "FOLDER", kept.folder)
    monkeypatch.chdir(PROJECT)
    return kept


def named(answer: Answer) -> list[tuple[Any, ...]]:
    return [(each["suspect"], each["a"], each["b"]) for each in answer.cause]


@pytest.mark.long
def test_neutral_differences_are_nothing_to_bisect(bisect: Bisect):
    answer = bisect(b=[*INNOCENT, "ranks=2"])
    assert answer.verdict == EQUAL and answer.exit_code == 0 and answer.cause == () and answer.trials == ()
    assert answer.reason.startswith("nothing to bisect: EQUAL, weights ")
    assert answer.notes == ["a cause that shows in one run of 3 only needs --repeats 8, 2 were made"]
    assert bisect.message[0] == f"5 suspects: {', '.join(sorted(word.partition('=')[0] for word in INNOCENT))}, ranks"


@pytest.mark.long
def test_one_cause_among_innocent_differences_is_named(bisect: Bisect):
    answer = bisect(a=["train.shift=1"], b=["train.shift=0", *INNOCENT])
    assert answer.verdict == FOUND and answer.exit_code == 0
    assert named(answer) == [("train.shift", 1, 0)] and answer.place == "step 0, batch"
    assert [f"  train.shift: 1 | 0: {answer.cause[0]['why']}"] == [*answer.lines()][1:2]
    facts = json.loads(json.dumps(answer.record(), allow_nan=False))
    assert facts["cause"] == [
        {"suspect": "train.shift", "a": 1, "b": 0, "why": "other numbers were asked for", "with": []}
    ]
    verdicts = {tuple(trial["kept"]): trial["bits"] for trial in facts["trials"]}
    assert verdicts["train.shift",] == "EQUAL" and len(verdicts) == len(facts["trials"])
    assert verdicts[tuple(word.partition("=")[0] for word in sorted(INNOCENT))] == "DIFFERS"
    assert facts["commit"] is None and all(trial["repeats"] == 1 for trial in facts["trials"])
    # once more: every training is found again, and the answer is the same
    assert bisect(a=["train.shift=1"], b=["train.shift=0", *INNOCENT]).cause == answer.cause and bisect.run.trained == 0


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Answer, list[str]]]:
    """A function that bisects without trainings, and gives the answer and its messages.

    An oracle says of what a trial would train with whether it comes out as B; both outcomes are runs made by hand.
    """
    monkeypatch.chdir(PROJECT)
    folders = write(tmp_path / "equal"), write(tmp_path / "differs", rows=traced(12, part=3), weights=ZEROS)
    runs = [Made(Requested("bisect"), folder, read(folder)) for folder in folders]

    def bisect(a: Sequence[str], b: Sequence[str], differs: Callable[[Setup], bool]) -> tuple[Answer, list[str]]:
        words, message = (split(a), split(b)), list[str]()
        two = (side(load(Config, overrides=each.overrides), each.ranks, each.variables) for each in words)
        maker: Any = SimpleNamespace(make=lambda setup, number: runs[differs(setup)])
        return bisected(maker, Question(*two), message.append, repeats=3), message

    return bisect


def test_two_causes_at_once_are_both_named_and_a_combination_that_is_refused_is_gone_around(answered: Any):
    """Two ranks are too many for one micro-batch."""
    b = {"model.dropout": 0.3, "seed": 7, "parallel.micro_batches": 1}
    answer, message = answered(
        ["ranks=2"],
        [f"{key}={value}" for key, value in b.items()],
        lambda setup: any(setup.config[key] == value for key, value in b.items()),
    )
    assert answer.verdict == FOUND and answer.place == "step 3, loss"
    assert {name for name, *_ in named(answer)} == {*b}
    assert all(not each["with"] for each in answer.cause)
    assert "unresolved" in {trial["bits"] for trial in answer.record()["trials"]}
    assert any("ranks=2 given, at most parallel.micro_batches=1 wanted" in line for line in message)


def test_cause_that_shows_in_one_run_of_three_is_named(answered: Any):
    shown, again = (itertools.cycle([False, False, True]) for _ in range(2))
    answer, message = answered(
        [],
        ["model.dropout=0.1000001", "loader.workers=1"],
        lambda setup: setup.config["model.dropout"] != 0.1 and next(shown),
    )
    assert named(answer) == [("model.dropout", 0.1, 0.1000001)], answer
    assert any(line.startswith("B does not repeat: 30%") and "after 9 equal runs" in line for line in message)
    assert max(trial.repeats for trial in answer.trials) >= 9
    other, _ = answered(["loader.workers=1"], [], lambda setup: next(again))
    assert other.verdict == NOT_FOUND and other.exit_code == 1
    assert other.reason == "the same settings do not repeat, neither in A nor in B"


@pytest.mark.long
def test_recorded_runs_come_again_and_their_cause_is_named(bisect: Bisect, tmp_path: Path):
    """Two runs that differ in the seed, and in a neutral key; then the record of one that nobody can make again."""
    for name, words in (("a", ["seed=3"]), ("b", ["seed=4", "checkpoint.every=2"])):
        texts = [word for text in (*bisect.common, "tracking.enabled=false", *words) for word in ("--set", text)]
        trainings.run(OURS, trainings.command("train", {}, "--out", tmp_path / name, *texts))
    runs = [str(tmp_path / name) for name in "ab"]
    answer = bisect(runs=runs)
    assert named(answer) == [("seed", 3, 4)] and answer.place and answer.place.startswith("step 0, batch")
    assert bisect.message[0] == "2 suspects: checkpoint.every, seed"
    assert bisect(runs=[runs[0], runs[0]]).verdict == EQUAL


def test_keys_with_which_a_run_starts_are_exchanged_together(answered: Any):
    """One without the others starts no run; and where the weights lie makes no difference."""
    start = {"start.run": "runs/a", "start.weights": "1" * 64, "start.state": "2" * 64}
    words = [f"{key}={value}" for key, value in start.items()]
    kept = [{key: setup[key] for key in start} for setup in ({**dict.fromkeys(start, "")}, start)]
    seen = []

    def differs(setup: Setup) -> bool:
        seen.append({key: setup.config[key] for key in start})
        return bool(setup.config["start.weights"])

    answer, message = answered(["loader.workers=1"], words, differs)
    assert named(answer) == [("start", "drawn by the seed", f"weights {'1' * 64}, state {'2' * 64}")]
    assert answer.cause[0]["why"] == "the run begins with other weights, or another state"
    assert message[0] == "2 suspects: loader.workers, start" and all(each in kept for each in seen)
    answer, message = answered(words, [*words, "start.run=runs/b"], lambda setup: False)
    assert answer.verdict == EQUAL and message[0] == "0 suspects"


@pytest.mark.long
def test_recorded_run_that_starts_from_another_one_comes_again(bisect: Bisect, tmp_path: Path):
    common = *bisect.common, "tracking.enabled=false"
    for name, words in (("a", []), ("b", ["--from", tmp_path / "a"])):
        texts = [word for text in common for word in ("--set", text)]
        trainings.run(OURS, trainings.command("train", {}, "--out", tmp_path / name, *texts, *words))
    answer = bisect(runs=[str(tmp_path / name) for name in "ab"])
    weights = read(tmp_path / "a").weights
    assert answer.verdict == FOUND and not answer.trials, answer
    assert named(answer) == [("start", "drawn by the seed", f"weights {weights}")]
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=rf"^{tmp_path}/a/model\.safetensors: missing; wanted SHA-256 {weights}"):
        bisect(runs=[str(tmp_path / name) for name in "ab"])


@pytest.mark.long
def test_record_whose_bits_do_not_come_again_is_told(bisect: Bisect, tmp_path: Path):
    """The receipt states other weights, as of a run on another machine."""
    import rfc8785

    runs = sorted(bisect.folder.glob("*/run"))
    made = next(run for run in runs if not read(run).stated["config"]["start.run"])
    shutil.copytree(made, tmp_path / "run")
    path = tmp_path / "run" / "receipt.json"
    stated = json.loads(path.read_bytes())
    stated["subject"][0]["digest"]["sha256"] = ZEROS
    path.write_bytes(rfc8785.dumps(stated))
    answer = bisect(runs=[str(tmp_path / "run"), str(made)])
    assert answer.verdict == NOT_FOUND and answer.exit_code == 1
    assert answer.reason.startswith(
        f"A is not reproduced here, so no trial can be compared with it: weights {'0' * 64} "
    )
    assert answer.reason.endswith(cause.UNRECORDED)


# ---- a culprit in the code


@dataclass(frozen=True)
class Repository:
    """A project with commits, by what they are."""

    root: Path
    commits: Mapping[str, str]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Five commits: one of them changes bits, and uncommitted work lies on top."""
    root = tmp_path_factory.mktemp("repository") / "project"
    files = "params.yaml", "dvc.yaml", "pyproject.toml", ".gitignore"
    copied(root, ("src", "vendor", "requirements", "data/raw"), files)
    package, commits = root / "src" / PACKAGE, dict[str, str]()
    for name, file, old, new in (
        ("start", "model.py", "", ""),
        ("comment", "model.py", "class Block(", "# a remark\nclass Block("),
        ("culprit", "model.py", "nn.Dropout(dropout)", "nn.Dropout(dropout / 2)"),
        ("other file", "data.py", '"""Yours: ', '"""Ours: '),
        ("later", "model.py", "# a remark\n", "# another remark\n"),
    ):
        edit(package / file, (old, new))
        commit(root, f"{name}\a of the model")
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        commits[name] = done.stdout.strip()
    (package / "model.py").write_text("uncommitted, and no Python\n")
    (root / "left.txt").write_text("not in git\n")
    return Repository(root, commits)


@pytest.mark.long
def test_commit_that_changed_bits_is_named_and_the_work_tree_left_alone(
    bisect: Bisect, repository: Repository, monkeypatch: pytest.MonkeyPatch
):
    root, commits = repository.root, repository.commits
    monkeypatch.chdir(root)
    monkeypatch.setattr(sides, "FOLDER", Path("build", "bisect"))
    before = state(root)
    answer = bisect(project=project_in(root), commits=("HEAD~4", "HEAD"))
    assert state(root) == before and not (root / "build" / "bisect" / "tree").exists()
    assert [each["suspect"] for each in answer.cause] == ["file model.py"], answer
    assert [commit.digest for commit in answer.commits] == [commits["culprit"]]
    line = next(line for line in answer.lines() if line.startswith("commit "))
    assert line.startswith(f"commit {commits['culprit'][:12]} (") and "culprit\\x07 of the model: " in line
    assert line.endswith(f"src/{PACKAGE}/model.py") and answer.record()["commit"] == commits["culprit"]


@pytest.mark.long
def test_runs_recorded_at_two_commits_lead_to_the_commit(
    bisect: Bisect, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Neither is what the project would make as it stands. The trials are those of the bisect before, kept."""
    monkeypatch.chdir(repository.root)
    monkeypatch.setattr(sides, "FOLDER", Path("build", "bisect"))
    project, (raw,) = project_in(repository.root), (repository.root / "data" / "raw").glob("*.gz")
    words = ("tracking.enabled=false", f"data.raw={raw}", *SMALL)
    texts = [word for text in words for word in ("--set", text)]
    with cloned(project, tmp_path, {}) as clone:
        for name in ("start", "later"):
            clone.check_out(repository.commits[name])
            for module, *out in (("prepare",), ("train", "--out", tmp_path / name)):
                settings = texts if out else texts[:4]
                trainings.run(clone.project, trainings.command(module, {}, *out, *settings))
    answer = bisect(runs=[str(tmp_path / "later"), str(tmp_path / "start")], project=project)
    assert [each["suspect"] for each in answer.cause] == ["file model.py"], answer
    assert not answer.commits and "does not come before" in answer.notes[0]
    answer = bisect(runs=[str(tmp_path / "start"), str(tmp_path / "later")], project=project)
    assert [commit.digest for commit in answer.commits] == [repository.commits["culprit"]]


@pytest.mark.long
def test_interrupted_bisect_of_commits_leaves_the_repository_as_it_was(repository: Repository, tmp_path: Path):
    from server import until

    root = repository.root
    shutil.rmtree(root / "build", ignore_errors=True)
    (root / "src" / PACKAGE / "model.py").write_text("")  # the command itself must start
    before = state(root)
    words = ["-m", "samebits", "bisect", "--commits", "HEAD~4", "HEAD", "--set", "train.epochs=1"]
    process = trainings.start(project_in(root), [sys.executable, *words], tmp_path / "log")
    until(lambda: process.poll() is not None or list((root / "build").glob("bisect/tree/data/prepared/*")))
    assert process.poll() is None, "it ended by itself"
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    assert state(root) == before and not (root / "build" / "bisect" / "tree").exists()


# ---- what is refused before it trains


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


def test_commit_without_a_library_leaves_the_one_that_runs_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that the other commit lacks is removed in the work copy, and nowhere else."""
    root = folder / "project"
    (root / "src" / PACKAGE).mkdir(parents=True)
    (root / "src" / PACKAGE / "model.py").touch()
    commit(root)
    running = folder / "running" / "samebits" / "core" / "step.py"
    running.parent.mkdir(parents=True)
    running.touch()
    monkeypatch.setattr("samebits.base.project.LIBRARY", folder / "running" / "samebits")
    said = pytest.raises(RunError, match=r"^commit HEAD: it has no vendor/samebits$")
    with cloned(project_in(root), folder / "kept", {}) as clone, said:
        clone.check_out("HEAD", ["samebits/core/step.py"], "HEAD")
    assert running.exists()


def test_commit_of_an_older_layout_is_refused_in_a_line(folder: Path):
    root = folder / "project"
    for name in (f"src/{PACKAGE}/model.py", "vendor/samebits/cli.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    commit(root)
    said = pytest.raises(UserError, match=r"^commit HEAD: its library has no command samebits, .* git worktree add ")
    with cloned(project_in(root), folder / "kept", {}) as clone, said:
        clone.check_out("HEAD")


def test_commits_outside_git_are_refused(folder: Path):
    shutil.copytree(PROJECT / "src", folder / "src")
    words = Named([], [], [], [], ("HEAD~1", "HEAD"), False)
    with pytest.raises(UserError, match="no such commit"), requested(project_in(folder), Config, words, str):
        raise AssertionError("it has commits")
