"""A generated project's own tests and linters: they take longest, so they begin first, classes side by side."""

import re

from conftest import InstalledProject


def own_tests(project: InstalledProject, half: int) -> None:
    """Run every second file of the project's tests, as its README says: make test."""
    files = sorted(path.relative_to(project.path) for path in (project.path / "tests").glob("test_*.py"))
    printed = project.make("test", f"TESTS={' '.join(map(str, files[half::2]))}")
    assert re.search(r"\d+ passed", printed) and "failed" not in printed and "skipped" not in printed


class TestFirstHalf:
    """Half of the files."""

    def test_own_tests_pass(self, project: InstalledProject) -> None:
        """They pass as generated."""
        own_tests(project, 0)


class TestSecondHalf:
    """The other half."""

    def test_own_tests_pass(self, project: InstalledProject) -> None:
        """They pass as generated."""
        own_tests(project, 1)


class TestLint:
    """Ruff and mypy, with the project's own settings."""

    def test_own_lint_passes(self, project: InstalledProject) -> None:
        """They find nothing."""
        project.make("lint")
