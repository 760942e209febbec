"""A full disk: told, and the older checkpoint stays whole."""

import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from states import ORIGIN, Training, silent
from support import TESTS, Trained, trained, training
from torch import nn
from warm import FORKS, Warm

from samebits.checkpoint.checkpoint import found, newest
from samebits.checkpoint.saver import Saver
from samebits.config.settings import Checkpoint
from samebits.core.optimizers import Optimizers

SMALL = 1 << 20  # bytes that the disk holds; a checkpoint of `Large` needs more than half of it


class Large(Training):
    """So large that only one of its checkpoints fits."""

    def __init__(self) -> None:
        self.model = nn.Linear(400, 400)
        self.optimizers = Optimizers(torch.optim.SGD(self.model.parameters(), lr=0.1), self.model)
        self.done = 1


def on_a_full_disk(folder: Path, on_error: str, limited: bool = False) -> dict[str, Any]:
    """Save twice, where the second one does not fit; what happened."""
    training = Large()
    saver = Saver(folder, ORIGIN, Checkpoint(every=1, keep=3, on_error=on_error), lambda: None)
    saver.save(training.state.look(1))
    saver.wait()
    if limited:  # no file may grow beyond half of one
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 4, resource.RLIM_INFINITY))
    saver.save(training.state.look(2))
    saver.wait()
    with redirect_stderr(io.StringIO()) as text:
        failure = saver.failure()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    there = newest(folder, ORIGIN, silent)
    rest = [path.name for path in folder.iterdir() if path not in found(folder)]
    shutil.rmtree(folder)
    lines = text.getvalue().splitlines()
    return {"failure": str(failure or ""), "told": lines, "step": there and there.step, "rest": rest}


HOW = "stop", "continue"
# In a process of its own, because its disk is full: prints what happened, stopping and continuing.
WRITER = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import support
from test_full_disk import HOW, on_a_full_disk
print(json.dumps({how: on_a_full_disk(Path(sys.argv[1]), how) for how in HOW}))
"""
SMALL_DISK = f'mount -t tmpfs -o size={SMALL} none "$0" && exec "$@"'  # in a mount namespace of its own
NAMESPACE = "unshare", "--map-root-user", "--mount"


def mountable() -> bool:
    """Whether this user may mount a disk."""
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("disk", [pytest.param("tmpfs", marks=pytest.mark.long), "limit"] if mountable() else ["limit"])
def test_full_disk_is_told_and_costs_no_older_checkpoint(disk: str, tmp_path: Path):
    if disk == "tmpfs":
        command = [sys.executable, "-c", WRITER, str(tmp_path / "checkpoints"), str(TESTS), str(Path(__file__).parent)]
        command = [*NAMESPACE, "sh", "-c", SMALL_DISK, str(tmp_path), *command]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        both = json.loads(done.stdout)
    else:
        with FORKS.Pool(1) as child:
            both = {how: child.apply(on_a_full_disk, (tmp_path / "checkpoints", how, True)) for how in HOW}
    for on_error, seen in both.items():
        assert seen["step"] == 1 and seen["rest"] == []
        (message,) = seen["told"] if on_error == "continue" else [seen["failure"]]
        assert message.startswith("no checkpoint was written: ")
        then = "Free some space, and the same command goes on from it"
        then = "The training goes on" if on_error == "continue" else then
        assert message.endswith(f"; the last one is whole, after step 1. {then}")
        reason = {"tmpfs": errno.ENOSPC, "limit": errno.EFBIG}[disk]
        assert os.strerror(reason) in message and "\n" not in message
        assert bool(seen["failure"]) == (on_error == "stop")


# ---- a whole run: no file may grow beyond so many bytes


LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1))
runpy.run_module("samebits", run_name="__main__", alter_sys=True)
"""
LIMITS = {"record": 3_000, "weights": 60_000}  # neither address.json fits in the first, nor the weights in the second


@pytest.mark.long
@pytest.mark.parametrize("hit", ["record", "weights"])
def test_run_that_meets_a_full_disk_is_told_and_finished_later(
    hit: str, prepared: Path, untracked: Trained, tmp_path: Path
):
    out = tmp_path / "run"
    settings = "tracking.enabled=false", "checkpoint.on_error=continue"
    script, said = tmp_path / "limited.py", tmp_path / "said"
    script.write_text(LIMITED.format(limit=LIMITS[hit]))
    code = Warm("train", *training(out, prepared, *settings), out=tmp_path / "out", err=said, script=script).wait()
    assert code == 1 and "Traceback" not in said.read_text(), said.read_text()
    text = said.read_text().splitlines()[-1]
    assert os.strerror(errno.EFBIG) in text
    assert ("model.safetensors was not written" if hit == "weights" else "free some space; the same command") in text
    again = trained(out, prepared, *settings)
    assert again.done.returncode == 0 and again.weights == untracked.weights
