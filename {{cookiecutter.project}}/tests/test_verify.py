"""Your training: its bits depend on no other run, number of processes or kill. `make verify` tries more ways."""

import subprocess
import sys
from typing import Any

from conftest import ROOT

WAYS = "once more", "2 ranks", "killed and resumed"


def test_short_trainings_give_the_same_bits(config: Any):
    only = [word for way in WAYS for word in ("--only", way)]
    command = [sys.executable, "-m", "samebits", "verify", "--set", f"data.prepared={config.data.prepared}", *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("one process", *WAYS))]
    assert len(rows) == len(WAYS) + 1 and all(row.endswith("EQUAL") for row in rows), done.stdout
