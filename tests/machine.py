"""What tests need of the machine itself: commands that must succeed, ports, and patience."""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 600  # seconds, for what takes a few: the machine may be busy


def sh(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; fail with all that it said."""
    words = list(map(str, command))
    done = subprocess.run(words, **{"capture_output": True, "text": True, **options})
    if done.returncode:
        pytest.fail(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


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
