"""What tests need of the machine itself: commands that must succeed, and packages that may have to be installed."""

import fcntl
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 180  # seconds, for what takes a few


def sh(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; fail with all that it said."""
    words = list(map(str, command))
    done = subprocess.run(words, **{"capture_output": True, "text": True, **options})
    if done.returncode:
        pytest.fail(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def install(*packages: str) -> None:
    """Install Debian packages; tests that run side by side wait for one another."""
    if os.geteuid():
        pytest.fail(f"only root can install what this test needs: apt-get install {' '.join(packages)}")
    with (Path(tempfile.gettempdir()) / "repro-template-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sh("apt-get", "update", "-qq")
        sh("apt-get", "install", "--yes", "-qq", "--no-install-recommends", *packages)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until something is the case."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"{what}: not within {patience:.0f} s")
        time.sleep(0.1)
