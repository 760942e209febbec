"""Code that changes while a stage starts, and bytecode that is not its source's, are refused by name."""

import os
from pathlib import Path

import pytest
from conftest import python
from project.repro.asked import loaded
from project.repro.errors import Refused
from project.repro.project import Project
from warm import PACKAGE, PROJECT

OLD, NEW = "RATE = 0.1\n", "RATE = 0.2\n"  # of one length


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose package is importable, with one module."""
    package = tmp_path / "src" / "sealed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rates.py").write_text(OLD)
    return Project(package)


def test_code_that_stays_is_not_refused(other: Project):
    loaded.remember(other)
    loaded.require_unchanged(other)


@pytest.mark.parametrize("name", ["rates.py", "new.py", "words.json"])
def test_code_that_changes_after_the_start_is_refused(name: str, other: Project):
    loaded.remember(other)
    (other.package / name).write_text(NEW)
    with pytest.raises(Refused, match=f"^{name}: changed while the stage started, so nobody knows what it loaded"):
        loaded.require_unchanged(other)


TOLD = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from {package}.repro.asked import loaded
from {package}.repro.errors import Refused
from {package}.repro.project import Project
import sealed.rates
try:
    loaded.require_unchanged(Project(Path({sealed!r})))
    print(sealed.rates.RATE, "fresh")
except Refused as refused:
    print(sealed.rates.RATE, refused)
"""


def seen(other: Project) -> str:
    """What another process loads, and what is told of it."""
    paths = [str(PROJECT / "src"), str(other.package.parent)]
    done = python("-c", TOLD.format(paths=paths, package=PACKAGE, sealed=str(other.package)))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bytecode_of_an_older_version_is_refused(other: Project, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    source = other.package / "rates.py"
    assert seen(other) == "0.1 fresh\n"
    kept = source.stat().st_mtime_ns
    source.write_text(NEW)
    os.utime(source, ns=(kept, kept))
    told = seen(other)
    assert told.startswith(f"0.1 {source}: Python ran ")  # the older one, indeed
    assert "the bytecode of an older version" in told
    later = kept + 2_000_000_000  # bytecode states whole seconds
    os.utime(source, ns=(later, later))  # a date of its own: Python looks again
    assert seen(other) == "0.2 fresh\n"


def test_source_that_was_only_touched_is_not_refused(other: Project):
    """As by a checkout that writes the same bytes with the same date."""
    source = other.package / "rates.py"
    assert seen(other) == "0.1 fresh\n"
    kept = source.stat().st_mtime_ns
    source.write_text(OLD)
    os.utime(source, ns=(kept, kept))
    assert seen(other) == "0.1 fresh\n"
