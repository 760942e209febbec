"""Tests that need root and packages; tests/conftest.py has the projects."""

from pathlib import Path

import disguise
import packages
import pytest


def pytest_sessionstart() -> None:
    """Stop where the machine lacks something."""
    if refusal := packages.refusal():
        pytest.exit(refusal, returncode=2)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of CPUID faulting where nothing uses it."""
    return True if collection_path.name == "test_spoof.py" and not disguise.faulting() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how other CPUs were played here."""
    how = "by CPUID faulting" if disguise.faulting() else "by QEMU, for this one cannot fault CPUID"
    terminalreporter.write_line(f"other CPUs: {how}")
