"""A project whose runs prove themselves, and such a run."""

import shutil
from pathlib import Path

import pytest
from clone import commit, copied, edit
from proving import CLEAN, FILES, FINISH, ended, planted, words
from support import PACKAGE


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with code of its own and its data prepared."""
    folder = copied(tmp_path_factory.mktemp("proof") / "project", ("src", "vendor", "requirements", "data/raw"), FILES)
    planted(folder, CLEAN)
    loop = folder / "src" / PACKAGE / "train.py"
    edit(
        loop,
        ("import samebits as sb", "import time\nimport samebits as sb"),
        ("step.log(", "step.log(clock=time.time(), "),
        (FINISH, f"{FINISH}    with open({str(folder / 'uploads.txt')!r}, 'a') as file:\n        file.write('once')\n"),
    )
    commit(folder)
    ended(folder, "prepare")
    return folder


@pytest.fixture
def project(clean: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(clean, tmp_path / "project", ignore=shutil.ignore_patterns("made*")))


@pytest.fixture(scope="session")
def proved(clean: Path) -> tuple[Path, str]:
    """A run that has proved itself, and what it printed."""
    (clean / "uploads.txt").unlink(missing_ok=True)
    printed = ended(clean, *words(clean, "train.epochs=2"))
    (clean / "uploads.txt").rename(clean / "uploaded.txt")
    return clean / "made", printed
