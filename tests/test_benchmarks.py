"""The measurements that need a GPU: without one, their command says what it did not check."""

import os
import shutil
import sys
from pathlib import Path

from conftest import ROOT, run


def test_without_a_gpu_it_is_said_what_was_not_checked(tmp_path: Path) -> None:
    """In a line, with exit code 2, and nothing is written."""
    before = sorted((ROOT / "benchmarks").iterdir())
    env = os.environ | {"PATH": str(tmp_path)}  # nor is there an nvidia-smi
    assert not shutil.which("nvidia-smi", path=env["PATH"])
    done = run(sys.executable, ROOT / "benchmarks" / "gpu.py", env=env, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("no GPU seen (no nvidia-smi), one wanted. Not checked: for each of convnet float32")
    assert len(done.stdout.splitlines()) == 1 and "world sizes 1, 2 and 4" in done.stdout
    assert sorted((ROOT / "benchmarks").iterdir()) == before
