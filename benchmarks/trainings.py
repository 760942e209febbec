"""Starts trainings of the project beside this file, stops them when time is over, and reads what they have left."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT, PACKAGE = HERE / "project", "repro_project"
MARK, TOKEN = "BENCHMARK_OF", f"{os.getpid()}-{time.time_ns()}"  # in the environment of all that is started
WARM_UP = 5  # steps of each run that are not timed
LAST_LINES = 80  # of what a failed command said: torchrun's own come last, and are many
ANYWHERE = "unhashed.modules=[all]"  # the packages lie beside the project, and torch wherever this machine has it
PROJECTS_OWN = "ours"  # of sharing.py: as the project trains
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=localhost")


class OutOfTime(Exception):
    """The part was stopped."""


class Failed(Exception):
    """A command ended with an error; with the last lines that it said."""


@dataclass
class Trainer:
    """Trains on `device`, with run directories, logs and compiled kernels in `folder`, until `stop` is called."""

    folder: Path
    device: str
    epochs: int
    pairs: int
    stopped: str = ""  # by what

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def stop(self, *signal_and_frame: object) -> None:
        """Kill all that runs; whoever waits for it gets OutOfTime."""
        self.stopped = "by a signal" if signal_and_frame else "by its time limit"
        kill_all()

    def prepare(self) -> None:
        """Make the splits of the dataset, where they are not there yet."""
        if not (PROJECT / "data" / "prepared").is_dir():
            self._ended(self._logged("prepare", ["-m", "samebits", "prepare", "--set", ANYWHERE]), "prepare")

    def train(self, name: str, *settings: str, **how: Any) -> Path:
        """Train, and return the run directory; `how` is what else `_training` takes."""
        self._ended(self._training(name, settings, **how), name)
        return self.folder / name

    def killed(self, name: str, *settings: str) -> None:
        """Train, and kill it (SIGKILL) as soon as it has saved a checkpoint."""
        process = self._training(name, (*settings, "checkpoint.every=4"))
        while process.poll() is None:
            if any((self.folder / name).glob("checkpoints/0*")):
                process.kill()
                process.wait()
                return
            time.sleep(0.005)
        self._ended(process, name)
        raise Failed(f"{name} ended before it was killed: let it train longer, with --epochs")

    def lines(self, *words: str) -> Iterator[str]:
        """Yield what `python -m samebits words…` prints, as it comes; its exit code does not matter."""
        process = self._start(["-m", "samebits", *words], subprocess.PIPE)
        assert process.stdout
        for line in process.stdout:
            yield line.rstrip()
        process.wait()
        self._go_on()

    def output(self, name: str) -> str:
        """What the newest training of this name printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _training(
        self,
        name: str,
        settings: tuple[str, ...],
        ranks: int = 1,
        kernels: str = "kernels",
        anew: bool = True,
        script: str = PROJECTS_OWN,
    ) -> "subprocess.Popen[str]":
        """Start one, with its run directory made `anew` or gone on with; `kernels` is the compiler's cache."""
        out = self.folder / name
        if anew:
            shutil.rmtree(out, ignore_errors=True)
        common = (f"device={self.device}", f"train.epochs={self.epochs}", "tracking.enabled=false", ANYWHERE)
        chosen = [word for setting in (*common, *settings) for word in ("--set", setting)]
        launcher = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks > 1 else []
        words = [*launcher, str(HERE / "sharing.py"), script, PACKAGE, *chosen, "--out", str(out)]
        return self._logged(name, words, kernels)

    def _logged(self, name: str, words: list[str], kernels: str = "kernels") -> "subprocess.Popen[str]":
        with (self.folder / f"{name}.log").open("w") as log:
            return self._start(words, log, kernels)

    def _start(self, words: list[str], output: object, kernels: str = "kernels") -> "subprocess.Popen[str]":
        self._go_on()
        paths = [str(PROJECT / "src"), str(PROJECT / "vendor"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "GIT_CEILING_DIRECTORIES": str(HERE),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / kernels),
            MARK: TOKEN,
        }
        process = subprocess.Popen(
            [sys.executable, *words], cwd=PROJECT, env=env, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        if self.stopped:  # since the look above: nobody else would end this one
            kill_all()
        return process

    def _ended(self, process: "subprocess.Popen[str]", name: str) -> None:
        code = process.wait()
        self._go_on()
        if code:
            raise Failed(f"{name} ended with {code}:\n" + "\n".join(self.output(name).splitlines()[-LAST_LINES:]))

    def _go_on(self) -> None:
        if self.stopped:
            raise OutOfTime


def kill_all() -> None:
    """Kill every process that was started here, and what those started, whatever their group or session."""
    sought, left = f"{MARK}={TOKEN}".encode(), True
    while left:
        left = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # another user's, or gone
                if sought in path.read_bytes().split(b"\0"):
                    left = True
                    os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.05)


def digests(out: Path) -> tuple[str, str]:
    """SHA-256 of a run's weights, and its trace root."""
    weights = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return weights, json.loads((out / "run.json").read_text())["tags"]["repro.trace"]


def milliseconds(out: Path) -> float:
    """The median time from one step's end to the next one's."""
    rows = (out / "trace" / "rank0000.jsonl").read_text().splitlines()
    ends = [json.loads(row)["monotonic"] for row in rows][WARM_UP:]
    return round(statistics.median(1000 * (b - a) for a, b in pairwise(ends)), 3)


def mebibytes(out: Path) -> float | None:
    """The peak of allocated GPU memory; None on a CPU."""
    path = out / "peak.json"
    return round(json.loads(path.read_text()) / 2**20, 1) if path.is_file() else None


def resumed_after(printed: str) -> int:
    """How many steps were done when a run went on from its checkpoint.

    Raises:
        Failed: it began anew.
    """
    found = re.search(r"^resumed .* after step (\d+)$", printed, re.MULTILINE)
    if not found or found[1] == "0":
        raise Failed("the killed training began anew instead of going on from a checkpoint")
    return int(found[1])
