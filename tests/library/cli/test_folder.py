"""A dataset that is a folder and needs no preparation is checked, trained on, kept by DVC and replayed as any other.

The digits, a file each, in a folder per class; `prepare.py` and `data.py` are written as "Make it yours" says.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from clone import command, commit, copied, edit, git, project_in
from project.config import Config
from project.data import parse
from support import PACKAGE, PROJECT, python

from samebits.address import hashing, manifest
from samebits.address.manifest import sha256_file
from samebits.base.project import LIBRARY
from samebits.record.receipt import read

RAW = "data/raw/digits"
pytestmark = pytest.mark.long
PREPARE = '''
    """The folder is used as it is."""


'''
LOAD = '''
class Images:
    """An image is read when it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return np.load(self.files[index])


def load(config: Config) -> tuple[Digits, Digits]:
    """Every fifth image is for the test."""
    files = sorted(Path(config.data.raw).glob("*/*.npy"))

    def split(chosen: list[Path], shift: int) -> Digits:
        return Digits(Images(chosen), np.array([int(file.parent.name) for file in chosen]), shift)

    return split([f for n, f in enumerate(files) if n % 5], config.train.shift), split(files[::5], 0)
'''


def between(path: Path, start: str, end: str, text: str) -> None:
    """Put a text in the place of that from `start`, which stays, to `end`."""
    before, _, rest = path.read_text().partition(start)
    path.write_text(before + start + text + (end + rest.partition(end)[2] if end else ""))


@pytest.fixture(scope="module")
def project(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project with the folder for a dataset, committed, and prepared through DVC."""
    folder = tmp_path_factory.mktemp("clone")
    files = "params.yaml", "results.lock", "dvc.yaml", "pyproject.toml", ".gitignore", ".dvcignore"
    copied(folder, ("src", "vendor", "requirements", ".dvc"), files)
    images, labels = parse(PROJECT / config.data.raw)
    for number in range(200):
        place = folder / RAW / str(labels[number])
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{number:03}.npy", images[number])

    source = folder / "src" / PACKAGE
    between(
        source / "prepare.py",
        "def prepare(config: Data, raw: Path, folder: Path) -> None:",
        'if __name__ == "__main__":\n    sb.main',
        PREPARE,
    )
    text = (source / "data.py").read_text()
    (source / "data.py").write_text(text[: text.index("def load(")] + LOAD.lstrip())
    edit(folder / "params.yaml", ("raw: data/raw/digits.csv.gz", f"raw: {RAW}"), ("enabled: true ", "enabled: false "))
    edit(folder / "params.yaml", ("  read: prepared ", "  read: both "))
    edit(folder / "params.yaml", ("epochs: 30 ", "epochs: 1 "), ("  workers: 0 ", "  workers: 1 "))
    printed = command(folder, "hash-data").stdout.strip()
    edit(folder / "params.yaml", (f"sha256: {config.data.sha256}", f"sha256: {printed}"))
    git(folder, "init", "--quiet")
    dvc(folder, "add", "--quiet", RAW)
    commit(folder)
    dvc(folder, "repro")
    commit(folder, "the first run")
    return folder


def dvc(folder: Path, *words: str) -> str:
    done = python("-m", "dvc", *words, cwd=folder, env={"PYTHONPATH": f"{folder}/src:{folder}/vendor"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stage(project: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return command(project, name, *words)


def test_dvc_and_check_find_the_run_as_it_was_made(project: Path):
    assert "Data and pipelines are up to date." in dvc(project, "repro")
    done = command(project, "check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_address_holds_one_hash_of_the_folder(project: Path):
    receipt = read(project / "artifacts").stated
    wanted = manifest.digest(hashing.entries(project / RAW))
    assert receipt["preimage"]["data"] == {
        "requested": {"read": "both", "sha256": wanted, "test_percent": 20},
        "files": [],
        "raw": True,
    }
    assert receipt["preimage"]["config"]["data"]["sha256"] == wanted


@pytest.fixture
def copy(project: Path, tmp_path: Path) -> Path:
    """A copy to plant faults in."""
    return Path(shutil.copytree(project, tmp_path / "copy", symlinks=True))


def test_altered_file_is_refused_by_name_everywhere(copy: Path):
    """It was altered after the preparation; one rank tells it for all."""
    assert command(copy, "check-data").returncode == 0
    (file,) = (copy / RAW).glob("*/007.npy")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()  # DVC may have made it a link into its cache
    file.write_bytes(data)
    message = f"{file.relative_to(copy)}: SHA-256 {sha256_file(file)} ({len(data)} bytes) seen, "
    for done in (
        stage(copy, "train", "--ranks", "2", "--out", "again"),
        stage(copy, "prepare"),
        stage(copy, "evaluate"),
        command(copy, "check-data"),
        command(copy, "check"),
    ):
        lines = [line for line in done.stderr.splitlines() if line.startswith(message)]
        assert done.returncode in (1, 2) and len(lines) == 1 and "met by" not in lines[0], done.stderr
        assert "Traceback" not in done.stderr
    assert not (copy / "again").exists()


def test_page_on_data_shows_this_preparation():
    assert PREPARE.strip() in (LIBRARY / "docs" / "data.md").read_text()


def test_folder_that_the_manifest_does_not_name_is_not_read(copy: Path):
    """The control: nobody would have checked it."""
    edit(copy / "params.yaml", ("  read: both ", "  read: prepared "))
    assert stage(copy, "prepare").returncode == 0
    done = stage(copy, "train", "--out", "again")
    assert done.returncode == 2 and f"{RAW}/" in done.stderr and "not in the content address" in done.stderr


def test_replay_takes_the_users_own_folder_or_that_from_dvc(copy: Path, tmp_path: Path):
    from samebits.analysis import replay

    stated = read(copy / "artifacts").stated
    wanted = stated["preimage"]["config"]["data"]["sha256"]
    git(tmp_path, "clone", "--quiet", str(copy), "tree")
    ours, tree, message = project_in(copy), project_in(tmp_path / "tree"), list[str]()
    found = replay._raw(ours, stated["config"], wanted, tree, message.append)
    assert found == copy / RAW and not message
    shutil.rmtree(copy / RAW)
    found = replay._raw(ours, stated["config"], wanted, tree, message.append)
    assert found == tree.root / RAW and message == [f"{RAW}: missing or other data here; asking DVC for it"]
    assert manifest.digest(hashing.entries(found)) == wanted
