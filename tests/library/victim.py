"""A training in processes of its own, and the means to kill them all."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from warm import PATIENCE, PROJECT, Warm

NAP = 0.002  # seconds between two looks
MARK = "VICTIM"  # a variable that all processes of one training inherit, whatever their session or parent
FOLLOWER = b"samebits.tracking.tracking"


class Victim:
    """A training, alone (ranks=None) or with several ranks, with its output in a log file.

    It starts warm; with `restarts` of lost ranks it starts cold, under torchrun.
    """

    def __init__(self, out: Path, *arguments: str, ranks: int | None = None, restarts: int | None = None) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        self._mark = uuid.uuid4().hex
        self._before = self.rows()
        arguments, env = (*arguments, "--out", str(out)), {MARK: self._mark}
        self.process: Warm | subprocess.Popen[bytes]
        if restarts is None:
            self.process = Warm(*arguments, out=self.log, err=self.log, ranks=ranks, env=env)
            return
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        numbers = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        command = [sys.executable, *torchrun, *numbers, "-m", "samebits", "train", *arguments]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=PROJECT, env=os.environ | env, stdout=log, stderr=log)

    def rows(self) -> int:
        """How many steps the run directory has recorded."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def news(self) -> int:
        """How many of them are this attempt's; fewer than none where a torn or an older record was cut."""
        return self.rows() - self._before

    def checkpoints(self) -> list[Path]:
        """The checkpoints in the run directory, oldest first."""
        return sorted((self.out / "checkpoints").glob("0*"))

    def writing(self) -> bool:
        """Whether a checkpoint is half written."""
        return any((self.out / "checkpoints").glob(".*.part"))

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Wait for a condition and return True, or False if the training ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(NAP)
        raise AssertionError(f"nothing after {seconds} s: {self.log.read_text()}")

    def pids(self, follower: bool = True) -> list[int]:
        """The training's processes that live; with or without the one that uploads to MLflow."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                # what was started has the mark; what was forked has it in no file, but prints into the same log
                marked = f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes()
                marked = marked or (folder / "fd" / "1").readlink() == self.log
                if marked and (follower or FOLLOWER not in (folder / "cmdline").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended
        return found

    def kill(self, follower: bool = True) -> None:
        """SIGKILL to all processes, until none is left."""
        while pids := self.pids(follower):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.poll()  # reaps it
        self.process.wait()

    def wait_for_ranks(self, seconds: float = PATIENCE) -> None:
        """Return once none of its ranks lives."""
        end = time.monotonic() + seconds
        while self.pids(follower=False):
            assert time.monotonic() < end, f"ranks live {seconds} s after their launcher: {self.log.read_text()}"
            time.sleep(NAP)

    def end(self, seconds: float = PATIENCE) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(seconds)


Start = Callable[..., Victim]  # the type of the `start` fixture
