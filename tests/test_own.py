"""A generated project's own tests and linters, which take longest: a file that is begun first, beside the others."""

import re

from conftest import InstalledProject


def test_own_tests_pass(project: InstalledProject) -> None:
    """As its README says: make test."""
    printed = project.make("test")
    assert re.search(r"\d+ passed", printed) and "failed" not in printed and "skipped" not in printed


def test_own_lint_passes(project: InstalledProject) -> None:
    """Ruff and mypy, with the project's own settings."""
    project.make("lint")
