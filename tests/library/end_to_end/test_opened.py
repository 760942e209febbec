"""A file of the project that no hash covers is refused, with the line that opened it."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from project.config import Config
from small import PIPELINE, Case, module, small
from support import OURS
from warm import PROJECT

from samebits import front
from samebits.base.project import LIBRARY
from samebits.config.params import load
from samebits.core.errors import UserError
from samebits.core.sampling import Seeded
from samebits.guards import opened

UNKNOWN = (
    "constants.json",
    "tables/rates.npy",
    "src/tides/.dropout",
    "src/tides/words.txt~",
    "vendor/samebits/analysis/x",
)
KNOWN = "src/tides/words.json", "data/prepared/rates.npy", "../rates.npy"
READING = """
import os
from pathlib import Path
import numpy as np

def by_open(name): open(name, "rb").close()
def by_pathlib(name): Path(name).read_bytes()
def by_numpy(name): np.load(name)
def by_mapping(name): np.load(name, mmap_mode="r")
def by_descriptor(name): os.close(os.open(name, os.O_RDONLY))
def by_both(name): open(name, "r+b").close()
def written(name): open(name, "wb").close()
def appended(name): open(name, "ab").close()
def replaced(name): written("beside"), os.replace("beside", name)
def kept(name):
    with open(name, "w+b") as file:
        np.save(file, np.zeros(2))
    np.load(name)
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return small(tmp_path, monkeypatch)


@pytest.fixture
def reader(case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module data.py of the small project, whose functions open files."""
    case.write("data/prepared/train.npy", "")
    for name in (*UNKNOWN, *KNOWN):
        case.write(name, "")
        with (case.project.root / name).open("wb") as file:
            np.save(file, np.zeros(2))
    opened.watch(case.project, [case.project.root / "data" / "prepared"])
    yield module("of_data", case.project.package / "data.py", READING)
    opened._watches.clear()


WAYS = "by_open", "by_pathlib", "by_numpy", "by_mapping", "by_descriptor", "by_both"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*UNKNOWN, "src/../constants.json"])
def test_file_that_no_hash_covers_is_refused_with_the_line_that_opened_it(
    case: Case, reader: ModuleType, way: str, name: str
):
    line = READING.splitlines().index(next(line for line in READING.splitlines() if way in line)) + 1
    named = name.removeprefix("src/../")
    for stage in ("train", ""):
        said = case.refusal(stage, lambda: getattr(reader, way)(name))
        assert said.startswith(f"{named} (by data.py:{line}): opened, but not in the content address: a change t")
    with pytest.raises(UserError, match="opened, but not in the content address"):
        Seeded([1.0], seed=0, check=opened.require_known)[(0, 0)]
    with pytest.raises(UserError) as refused:
        opened.require_known(local=True)
    assert refused.value.local  # whichever rank it is, it tells


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KNOWN)
def test_file_that_is_hashed_or_lies_elsewhere_is_let_through(case: Case, reader: ModuleType, way: str, name: str):
    case.run("train", lambda: getattr(reader, way)(name))
    assert opened.unknown() == {}


def test_folder_that_is_let_through_is_not_mistaken_for_another_of_its_name(
    case: Case, reader: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    def read() -> None:
        for folder in ("data/prepared", "tables", "data/prepared"):
            monkeypatch.chdir(case.project.root / folder)
            reader.by_open("rates.npy")
        monkeypatch.chdir(case.project.root)

    assert case.refusal("train", read).startswith("tables/rates.npy (by data.py:")
    assert [*opened.unknown()] == ["tables/rates.npy"]


def test_file_that_the_stage_itself_wrote_is_let_through(case: Case, reader: ModuleType):
    case.run("train", lambda: (reader.written("notes.txt"), reader.by_open("notes.txt"), reader.kept("rates.npy")))


# ---- the run's own folder


def saved(path: Path, number: int) -> None:
    """A file that a library writes in C, so that nobody sees it: the process of another program does."""
    subprocess.run([sys.executable, "-c", f"open({str(path)!r}, 'w').write('{number}' * {number})"], check=True)


# what the code does, and whether it reads what lies there from before
OWN: dict[str, tuple[Callable[[ModuleType, Path], object], bool]] = {
    "read": (lambda reader, out: reader.by_open(out / "old.npy"), True),
    "in a folder": (lambda reader, out: reader.by_numpy(out / "deep" / "old.npy"), True),
    "appended": (lambda reader, out: (reader.appended(out / "old.npy"), reader.by_open(out / "old.npy")), True),
    "both": (lambda reader, out: reader.by_both(out / "old.npy"), True),
    "renamed": (lambda reader, out: ((out / "old.npy").rename(out / "b"), reader.by_open(out / "b")), True),
    "written anew": (lambda reader, out: (reader.written(out / "old.npy"), reader.by_open(out / "old.npy")), False),
    "written in C": (lambda reader, out: (saved(out / "old.npy", 7), reader.by_open(out / "old.npy")), False),
    "replaced": (lambda reader, out: (reader.replaced(out / "old.npy"), reader.by_open(out / "old.npy")), False),
    "new": (lambda reader, out: (reader.written(out / "b"), reader.by_open(out / "b")), False),
    "new in C": (lambda reader, out: (saved(out / "b", 7), reader.by_open(out / "b")), False),
    "by the library": (lambda reader, out: module("run", LIBRARY / "run.py", READING).by_open(out / "old.npy"), False),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("way", OWN)
def test_file_of_the_runs_folder_from_before_is_refused(
    case: Case, reader: ModuleType, way: str, inside: bool, tmp_path_factory: pytest.TempPathFactory
):
    """As `if (out / "head.npy").exists(): load it`, which makes the second run another one."""
    out = case.project.root / "run" if inside else tmp_path_factory.mktemp("scratch") / "run"
    (out / "deep").mkdir(parents=True)
    for path in (out / "old.npy", out / "deep" / "old.npy"):
        np.save(path, np.zeros(2))
    opened.watch(case.project, [], out)
    act, refused = OWN[way]
    if refused:
        said = case.refusal("train", lambda: act(reader, out))
        name = out.relative_to(case.project.root) if inside else out
        assert said.startswith(f"{name}/") and " (by data.py:" in said
        assert "opened, but written before this process began" in said and "run.steps(state=...)" in said
    else:
        case.run("train", lambda: act(reader, out))


@pytest.mark.parametrize("trains", [True, False])
def test_training_has_the_folder_of_its_run_watched(trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "old").touch()
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(front.loaded, "remember", lambda project: None)
    try:
        front.begin(OURS, [], tmp_path, trains=trains)
        (tmp_path / "old").read_text()
        assert [*opened._watches[0].earlier] == [str(tmp_path / "old")] * trains
    finally:
        opened._watches.clear()


def test_file_that_the_library_opens_is_let_through(case: Case, reader: ModuleType):
    ours = module("ours", LIBRARY / "run.py", READING)
    case.run("train", lambda: (ours.by_open("constants.json"), ours.by_pathlib("constants.json")))


class Folder:
    """The dataset of a library: each item is a file."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        self.library.by_open("constants.json")
        return 1.0


def test_file_that_a_librarys_dataset_opens_is_refused(case: Case, reader: ModuleType):
    """The library asks it for an item, and no line of the owner's stands between."""
    library = module("library", case.project.root.parent / "venv" / "site-packages" / "images" / "folder.py", READING)
    calling = "def item(dataset): return dataset[0]"
    ours = module("ours", LIBRARY / "core" / "sampling.py", calling)
    said = case.refusal("train", lambda: ours.item(Folder(library)))
    assert said.startswith("constants.json (by images/folder.py:6): opened, but not in the content address")


def test_file_that_a_thread_opens_is_refused(case: Case, reader: ModuleType):
    """No line of anybody's calls it there."""

    def during() -> None:
        thread = threading.Thread(target=Path("constants.json").read_bytes)
        thread.start()
        thread.join()

    said = case.refusal("train", during)
    assert said.startswith("constants.json (by a thread): opened, but not in the content address")


@pytest.mark.parametrize("key", ["unhashed.files", "unhashed.modules"])
def test_empty_name_is_refused(key: str):
    """It would stand for the whole project."""
    with pytest.raises(UserError, match=rf"--set {key}.*: '' given, text of at least 1 character wanted"):
        load(Config, PROJECT / "params.yaml", [f"{key}=['']"])


@pytest.mark.parametrize("known", ["tables", "tables/rates.npy", "link.npy"])
def test_file_that_was_checked_is_let_through(case: Case, reader: ModuleType, known: str):
    """By its own name, be it a link into DVC's cache; others are refused as before."""
    (case.project.root / "link.npy").symlink_to(case.project.root / "tables" / "rates.npy")
    opened.know(Path(known))
    case.run("train", lambda: reader.by_mapping("link.npy" if known == "link.npy" else "tables/rates.npy"))
    assert case.refusal("train", lambda: reader.by_open("constants.json")).startswith("constants.json (by data.py:")


def test_preparation_must_list_the_file_that_it_opens(case: Case, reader: ModuleType):
    """Its outcome is hashed, so only DVC has to know."""
    case.write("data/raw.csv", "")
    case.write("dvc.yaml", PIPELINE.replace("src/tides/data.py,", "src/tides/data.py, src/tides/words.json,"))
    case.run("prepare", lambda: reader.by_open("data/raw.csv"))  # as ${data.raw}
    said = case.refusal("prepare", lambda: reader.by_open("constants.json"))
    assert "dvc.yaml: deps of stage prepare lack constants.json: a change there" in said
