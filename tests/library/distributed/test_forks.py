"""Trainings that begin with torch loaded: forks that are as new processes, but for the libraries."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from clone import copied, project_in
from project.config import Config
from server import until, until_gone
from support import OURS as PROJECT
from support import PACKAGE

from samebits.analysis import verify
from samebits.analysis.verify import ONCE, WAYS, Way, starting
from samebits.base.project import Project
from samebits.config.params import load
from samebits.core.errors import RunError
from samebits.start import trainings
from samebits.start.warm import Warm

# Says how it was started, or meets the other ranks, fails, waits. It stands where the project's own code does.
MODULE = """
import json, os, signal, sys, time
import {package}.model
torch = sys.modules["torch"]

def meet():
    torch.distributed.init_process_group("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    said = [os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], total.item()]
    os.write(1, f"{json.dumps(said)}\\n".encode())  # at once, or the lines of two ranks may be one

def say():
    mine = sorted(name for name in sys.modules if name.startswith("samebits.analysis"))
    group, tasks = os.getpgrp() == os.getpid(), len(os.listdir("/proc/self/task"))
    places = sorted(name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    print(json.dumps([sys.argv[1:], sys.orig_argv[1:], __name__, mine, group, tasks, places, sys.stdin.read()]))

def fail():
    rank = int(os.environ["RANK"])
    if rank:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        time.sleep(3600)
    sys.exit(2)

def refuse():
    from samebits.core import errors
    if os.environ["RANK"] == "0":
        time.sleep(3600)
    errors.PATIENCE = 0
    errors.UserError("why").report()
    sys.exit(2)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wait():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(3600)

globals()[sys.argv[1]]()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose package holds that module."""
    return project_in(copied(tmp_path_factory.mktemp("project"), ("src", "vendor"), ["pyproject.toml"]))


@pytest.fixture(scope="module")
def warm(project: Project) -> Iterator[Warm]:
    with Warm(project, trainings.environment(project)) as warm:
        yield warm


@pytest.fixture
def module(project: Project) -> str:
    """The name of the module."""
    (project.package / "forked.py").write_text(MODULE.replace("{package}", PACKAGE))
    return f"{PACKAGE}.forked"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a fork prints."""
    (tmp_path / "log").touch()
    return tmp_path / "log"


def test_fork_is_started_as_a_process_of_its_own(warm: Warm, module: str, log: Path):
    log.write_text("before\n")
    assert warm.start(module, ["say", "--out", "a b"], log).wait() == 0
    before, said = log.read_text().splitlines()
    words = ["say", "--out", "a b"]
    alone = [words, ["-m", module, *words], "__main__", [], True, 1, [], ""]
    assert before == "before" and json.loads(said) == alone


def test_code_is_that_of_the_moment_of_the_fork(warm: Warm, module: str, project: Project, tmp_path: Path):
    for said in ("one", "another"):
        (project.package / "forked.py").write_text(f"print({said!r})\n# {said}")
        assert warm.start(module, [], tmp_path / said).wait() == 0
        assert (tmp_path / said).read_text() == f"{said}\n"


def test_ranks_meet_at_a_port_of_their_own(warm: Warm, module: str, tmp_path: Path):
    trainings = [warm.start(module, ["meet"], tmp_path / name, ranks=2) for name in "ab"]
    assert [training.wait() for training in trainings] == [0, 0]
    for name in "ab":
        ranks = sorted(map(json.loads, (tmp_path / name).read_text().splitlines()))
        assert ranks == [["0", "0", "2", 2.0], ["1", "1", "2", 2.0]]


ENDS = [  # how a rank ends before the first has spoken, how many there are, what code counts, and what is said
    ("fail", 3, 2, ""),
    ("refuse", 3, 2, "why\n"),
    ("die", 1, -signal.SIGKILL, ""),
]


@pytest.mark.parametrize(("how", "ranks", "code", "said"), ENDS)
def test_rank_that_ends_ends_the_others_and_its_code_counts(
    how: str, ranks: int, code: int, said: str, warm: Warm, module: str, log: Path
):
    for _ in range(2):  # the next training is none the worse, and says it anew
        assert warm.start(module, [how], log, ranks=ranks).wait() == code
    assert log.read_text() == 2 * said


@pytest.mark.parametrize("ranks", [1, 2])
def test_group_is_ended_at_once(warm: Warm, module: str, ranks: int, log: Path):
    forks = warm.start(module, ["wait"], log, ranks=ranks)
    until(lambda: log.read_text().count("\n") == ranks or forks.poll())
    assert forks.poll() is None
    os.killpg(forks.pid, signal.SIGKILL)
    assert forks.wait() == -signal.SIGKILL


PARENT = """
import sys, time
from pathlib import Path
from samebits.base.project import Project
from samebits.start import trainings
from samebits.start.warm import Warm
PROJECT = Project.at(Path.cwd())
with Warm(PROJECT, trainings.environment(PROJECT)) as warm:
    warm.start("{package}.forked", ["wait"], log := Path(sys.argv[1]))
    while not log.read_text():
        time.sleep(0.01)
    {then}
"""


@pytest.mark.parametrize("then", ["time.sleep(3600)", "raise KeyboardInterrupt"])
def test_fork_ends_with_who_asked_for_it(then: str, module: str, project: Project, log: Path):
    code = PARENT.replace("{package}", PACKAGE).replace("{then}", then)
    environ = trainings.environment(project)
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(log)], env=environ, stderr=subprocess.DEVNULL, cwd=project.root
    )
    pid = int(until(log.read_text))
    parent.send_signal(signal.SIGKILL) if "sleep" in then else None
    parent.wait()
    until_gone(pid)


def test_process_that_cannot_load_torch_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    environ = trainings.environment(PROJECT)
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    message = r"^the process that loads torch ended with 1: see above$"
    with Warm(PROJECT, environ) as warm, pytest.raises(RunError, match=message):
        warm.start("samebits", ["train"], tmp_path / "log")
    assert "no torch here" in capfd.readouterr().err


# ---- which ways are forks


class Begun(Warm):
    """Stands in for a process in other circumstances."""

    has_begun = True
    not_tried: ClassVar[dict[str, str]] = {}


FORKED = {way.name for way in WAYS} - {"2 ranks"}


@pytest.mark.parametrize(("cpu", "forked"), [("portable", FORKED), ("native", {w.name for w in WAYS if w.ranks == 1})])
def test_way_is_a_fork_unless_it_must_begin_as_users_begin(
    cpu: str, forked: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Without a flag that fixes the threads, torchrun gives its ranks other ones than one process has."""
    monkeypatch.setattr(verify, "FOLDER", tmp_path)
    for name in [*os.environ]:
        if name.endswith("_NUM_THREADS"):
            monkeypatch.delenv(name)
    seen: dict[str, str] = {}
    way: list[Way] = []
    monkeypatch.setattr(trainings, "start", lambda *given: seen.update({way[-1].name: "started"}))
    monkeypatch.setattr(Warm, "start", lambda *given: seen.update({way[-1].name: "forked"}))
    monkeypatch.setattr(verify, "Fresh", lambda project, *given: Begun(project, {}, [sys.executable, "-c", ""]))
    config = load(Config, PROJECT.root / "params.yaml", [f"determinism.cpu={cpu}"])
    with starting(PROJECT, config, lambda line: None) as start:
        for each in (ONCE, *WAYS):
            way.append(each)
            start(each, {})
    assert {name for name, how in seen.items() if how == "forked"} == forked
    assert len(seen) == 1 + len(WAYS)
