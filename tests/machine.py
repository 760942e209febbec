"""What tests need of the machine itself: commands that must succeed, and packages that may have to be installed."""

import os
import subprocess
from pathlib import Path

import pytest


def sh(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command; fail with all that it said."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def install(*packages: str) -> None:
    """Install Debian packages."""
    if os.geteuid():
        pytest.fail(f"only root can install what this test needs: apt-get install {' '.join(packages)}")
    sh("apt-get", "update", "-qq")
    sh("apt-get", "install", "--yes", "-qq", "--no-install-recommends", *packages)
