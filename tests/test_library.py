"""The library's tests, on a freshly generated project: groups of their files, side by side as classes are."""

import faulthandler
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bake import ROOT, in_venv
from baked import PROJECT, InstalledProject, run

TESTS = ROOT / "tests" / "library"
REPORT = r"^\d+ passed(, \d+ (deselected|warnings?))* in "  # and nothing failed, nothing skipped


HANGING = "import time\ndef test_hangs(): time.sleep(2)"


def test_hanging_test_shows_where_it_waits(tmp_path: Path) -> None:
    """After two minutes: here, in the tests of the library, and in those of a generated project."""
    for settings in (ROOT / "pyproject.toml", TESTS / "pytest.ini", ROOT / PROJECT / "pyproject.toml"):
        assert re.search("^faulthandler_timeout = 120\\b", settings.read_text(), re.MULTILINE), settings
    (tmp_path / "test_hanging.py").write_text(HANGING)
    words = [sys.executable, "-m", "pytest", "-c", str(TESTS / "pytest.ini"), "-o", "faulthandler_timeout=0.5"]
    done = run(*words, f"--rootdir={tmp_path}", tmp_path, cwd=tmp_path, stderr=subprocess.PIPE)
    assert done.stderr.startswith("Timeout") and 'test_hanging.py", line 2 in test_hangs' in done.stderr


class Group:
    """Files that share what is slow to make: a server, a clone, a run."""

    files: tuple[str, ...]

    def test_library(
        self, project: InstalledProject, pytestconfig: pytest.Config, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """They pass, and none is skipped. One that hangs says so at once; here it would wait for the end of all."""
        faulthandler.cancel_dump_traceback_later()
        env = in_venv(project.path, project.env) | {"REPRO_PROJECT": str(project.path)}
        names = [f"test_{name}.py" for name in self.files]
        marked = ["-m", pytestconfig.option.markexpr]  # the tests that are chosen here
        with capfd.disabled():
            printed = run("python", "-m", "pytest", *marked, *names, cwd=TESTS, env=env, stderr=None).stdout
        assert re.search(REPORT, printed, re.MULTILINE), printed


class TestSharded(Group):
    """The sum of gradients, and sharded gradients, optimizer state and weights."""

    files = ("accumulate", "buffers", "sharded", "stored", "tree", "worlds")


class TestRecords(Group):
    """What is written down, and its way to a server."""

    files = ("environment", "full_disk", "receipt", "results", "sync", "tracking")


class TestRepeated(Group):
    """Trainings that are killed, made again, or compared."""

    files = ("diff", "interrupted", "replay", "resume", "values", "verify", "world")


class TestTraining(Group):
    """How the bits are kept while ranks train, and how ranks are started and stopped."""

    files = ("agreement", "brought", "evaluation", "folder", "forgotten", "integrity", "opening", "sampling")
    files += ("torchrun", "trace", "training")


class TestMeasuring(Group):
    """The verbs that train in order to compare."""

    files = ("bisect", "bisected", "bundle", "cost")
    files += ("noise", "perturb", "series", "trial")


class TestRest(Group):
    """Everything else."""

    files = tuple(
        sorted(
            {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
            - {name for group in Group.__subclasses__() for name in group.files}
        )
    )
