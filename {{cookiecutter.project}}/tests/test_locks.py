"""Your dependencies: the locks hold all that pyproject.toml asks for, each by version and hash."""

import subprocess
import sys

from conftest import ROOT


def test_locks_fit_pyproject():
    done = subprocess.run([sys.executable, "requirements/check_locks.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
