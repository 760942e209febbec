"""Trainings that take turns, step by step: a process group for each way, all alive at once, one at work."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import harness  # (others find the tools' modules by this file)
from bake import PACKAGE, ROOT, TOOLS, VENV, bake, in_venv, venv_of  # noqa: F401
from harness import prepared
from peers import ONE_BATCH, PLAIN
from sharding import sent

REQUIREMENTS = ROOT / "measure" / "requirements.txt"
PEERS_VENV = ROOT / "build" / "venv-measure"
RANK = ROOT / "measure" / "rank.py"
ROUNDS, WARM = 15, 2  # the first ones warm up, and are not counted
ALWAYS = (
    "device=cpu",
    "train.evaluate_every=1000000",
    "checkpoint.every=1000000",
    "tracking.enabled=false",
    "unhashed.modules=[all]",  # these scripts are not the project's
)


@dataclass(frozen=True)
class Workload:
    """What is trained."""

    title: str  # as the table names it
    settings: tuple[str, ...]  # keys of params.yaml
    steps: int  # of a turn; the first one is not counted, for the others have used the caches meanwhile
    starter: str = "digits"  # of the project
    processes: tuple[int, ...] = (1, 2, 4)  # on how many it is trained, for the table


@dataclass(frozen=True)
class Way:
    """How it is trained."""

    title: str  # as the table names it
    script: str = "ours"  # that, or a name of peers.PEERS
    settings: tuple[str, ...] = ()  # keys of params.yaml
    cells: tuple[str, ...] = ("*-[12]",)  # patterns of the parts of the table that have it
    slower: float = 0.0  # a planted fault: each step sleeps for this share of its own time
    ranks: int = 0  # on how many processes; 0: as its part of the table says


@dataclass(frozen=True)
class Taken:
    """What one way took."""

    seconds: list[float]  # per step, a number for each round
    memory: int  # in bytes, of its largest process
    sent: float = 0.0  # bytes of a process to others in a step, where nothing else used the loopback interface


EPOCHS = "train.epochs=10000"  # more than are ever made
WORKLOADS = {
    "convnet": Workload("digits, convnet", (EPOCHS,), 4),
    "few": Workload("digits, convnet, 2 micro-batches", (EPOCHS, "parallel.micro_batches=2"), 4, processes=(1,)),
    "transformer": Workload("digits, transformer", (EPOCHS, "model.name=transformer"), 4),
    "large": Workload(
        "digits, larger transformer",
        (EPOCHS, "model.name=transformer", "model.width=256", "model.depth=6", "parallel.global_batch=16"),
        2,
    ),
    "images": Workload("images, ResNet", (EPOCHS,), 4, "images"),
    "language": Workload("language, Llama", ("train.steps=1000000",), 2, "language"),
}
PINNED, LIBRARIES = "pinned", ("fabric", "accelerate")
LARGE = ("large-[12]",)  # of a model whose size tells something, where others would tell the same
WAYS = {
    ONE_BATCH: Way("plain PyTorch, one batch per step", ONE_BATCH),
    PLAIN: Way("plain PyTorch", PLAIN, cells=("*",)),
    PINNED: Way("plain PyTorch, the project's flags", PINNED),
    "fabric": Way("Lightning Fabric, deterministic", "fabric", cells=("convnet-2", *LARGE)),
    "accelerate": Way("Accelerate, deterministic", "accelerate", cells=("convnet-2", *LARGE)),
    "off": Way("project, trace `off`", settings=("trace.level=off",)),
    "step": Way("project", settings=("trace.level=step",), cells=("*",)),
    "tensor": Way("project, trace `tensor`", settings=("trace.level=tensor",), cells=("convnet-1", *LARGE)),
    "native": Way("project, cpu `native`", settings=("determinism.cpu=native",)),
    "optimizer": Way("project, shard `optimizer`", settings=("parallel.shard=optimizer",), cells=("large-2",)),
    "full": Way("project, shard `full`", settings=("parallel.shard=full",), cells=("large-2",)),
}
CELLS = {f"{name}-{ranks}": (name, ranks) for name, one in WORKLOADS.items() for ranks in one.processes}  # of the table


class Group:
    """The processes of one way. They wait before each step for which there is no order."""

    def __init__(self, project: Path, way: Way, workload: Workload, ranks: int, place: Path) -> None:
        self._log = place.with_suffix(".log")
        python = (PEERS_VENV if way.script in LIBRARIES else venv_of(workload.starter)) / "bin" / "python"
        settings = [*ALWAYS, *workload.settings, *way.settings]
        command = [str(python), str(RANK), way.script, str(way.slower), str(place), *settings]
        port, self._ranks = _free_port(), []
        for rank in range(ranks):
            with self._log.open("a") as log:
                pipe, env = subprocess.PIPE, environment(project, rank, ranks, port)
                self._ranks.append(
                    subprocess.Popen(command, cwd=project, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True)
                )

    def answers(self) -> tuple[list[float], int]:
        """The seconds of the slowest process for each step of the last order, and the memory of the largest.

        Raises:
            SystemExit: a process has ended.
        """
        lines = [rank.stdout.readline() for rank in self._ranks]
        if not all(lines):
            print(f"a training ended too early:\n{self._log.read_text()[-2000:]}", file=sys.stderr)
            raise SystemExit(2)
        message = [json.loads(line) for line in lines]
        return [max(step) for step in zip(*(one["seconds"] for one in message), strict=True)], max(
            one["memory"] for one in message
        )

    def make(self, steps: int) -> tuple[list[float], int]:
        """Make so many steps; see `answers`."""
        for rank in self._ranks:
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        return self.answers()

    def end(self) -> None:
        """Let go of all processes; end those that do not end by themselves."""
        for rank in self._ranks:
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            rank.stdout.close()


def environment(project: Path, rank: int, ranks: int, port: int) -> dict[str, str]:
    """That of a process: one thread for each way, and no flag that this shell happens to set."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env = in_venv(project, kept) | harness.ONE_THREAD
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        env |= {name: str(value) for name, value in place.items()}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return env


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as one:
        return int(one.getsockname()[1])


def measured(
    project: Path, ways: Mapping[str, Way], workload: Workload, ranks: int, rounds: int = ROUNDS
) -> dict[str, Taken]:
    """What each of the ways took. In a round each makes one turn; each round begins with another way.

    Raises:
        SystemExit: a training ended too early.
    """
    runs, groups = project / "build" / "runs", dict[str, Group]()
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    with ExitStack() as stack:
        for name, way in ways.items():
            groups[name] = Group(project, way, workload, way.ranks or ranks, runs / name)
            stack.callback(groups[name].end)
        counted, memory = {name: list[float]() for name in ways}, dict[str, int]()
        for group in groups.values():
            group.answers()

        def turn(name: str) -> float:
            before = sent()
            steps, memory[name] = groups[name].make(workload.steps)
            counted[name].append((sent() - before) / workload.steps / (ways[name].ranks or ranks))
            return median(steps[1:])

        seconds = harness.in_turn(ways, turn, range(WARM + rounds))
    return {name: Taken(seconds[name][WARM:], memory[name], median(counted[name])) for name in ways}


def ways_of(cell: str) -> dict[str, Way]:
    """The ways in which a part of the table is trained."""
    return {name: way for name, way in WAYS.items() if any(fnmatch(cell, pattern) for pattern in way.cells)}


def trained(
    ways: Mapping[str, Mapping[str, Way]], rounds: int
) -> Iterator[tuple[str, tuple[str, int], dict[str, Taken]]]:
    """What each part of the table gave, with a line on the machine; one generated project for each starter."""
    place = ""
    for starter, cells in groupby(sorted(ways, key=starter_of), starter_of):
        with prepared(starter) as project:
            place = place or harness.about()
            for cell in cells:
                workload, ranks = CELLS[cell]
                if any(way.script in LIBRARIES for way in ways[cell].values()):
                    make_peers_venv()
                yield place, CELLS[cell], measured(project, ways[cell], WORKLOADS[workload], ranks, rounds)


def starter_of(cell: str) -> str:
    """What a part of the table is trained with."""
    return WORKLOADS[CELLS[cell][0]].starter


def make_peers_venv() -> None:
    """An environment that sees all packages of the project's, torch among them, and has these libraries beside."""
    own, theirs, mark = VENV / "bin" / "python", PEERS_VENV / "bin" / "python", PEERS_VENV / ".requirements"
    if mark.is_file() and mark.read_text() == REQUIREMENTS.read_text():
        return
    subprocess.run([own, "-m", "venv", "--clear", PEERS_VENV], check=True)
    requested = "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    Path(harness.printed(ROOT, *requested, venv=PEERS_VENV), "project.pth").write_text(
        f"{harness.printed(ROOT, *requested)}\n"
    )
    pip = [theirs, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--requirement", REQUIREMENTS], check=True)
    mark.write_text(REQUIREMENTS.read_text())
