"""docs/architecture.md is made of the code, and its arrows point downward."""

import shutil
from pathlib import Path

import architecture
import pytest
from architecture import DOCUMENT, LIBRARY, Library, document
from bake import ROOT, TOOLS
from baked import run


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return the folder of a copy of the library."""
    return Path(shutil.copytree(LIBRARY, tmp_path / "samebits", ignore=shutil.ignore_patterns("__pycache__")))


def test_document_is_that_of_the_code() -> None:
    """After a change: make architecture."""
    assert DOCUMENT.read_text() == document(Library(LIBRARY))


def test_core_is_the_lowest_room_and_no_training_imports_analysis() -> None:
    library = Library(LIBRARY)
    assert library.order()[-1] == "core"
    assert not [name for name in library.training() if name.startswith(("analysis", "cli"))]


def test_import_upward_is_found(copied: Path) -> None:
    with (copied / "core" / "seeds.py").open("a") as file:
        file.write("from ..record import names\n")
    with pytest.raises(ValueError, match=r"^rooms that import each other: .*\bcore\b.*\brecord\b"):
        Library(copied).order()


def broken(folder: Path) -> str:
    """What import-linter finds in a library, by the contracts of this repository's pyproject.toml."""
    words = TOOLS / "lint-imports", "--no-cache", "--no-logo", "--config", ROOT / "pyproject.toml"
    done = run(*words, cwd=folder.parent, check=False)
    return done.stdout if done.returncode else ""


@pytest.mark.parametrize(
    ("name", "line", "said"),
    (
        ("core/seeds.py", "from ..record import names", "samebits.core is not allowed to import samebits.record"),
        ("core/seeds.py", "import click", "samebits.core is not allowed to import click"),
        ("record/names.py", "import torch", "samebits.record is not allowed to import torch"),
        ("newcomer.py", "", "newcomer"),
    ),
)
def test_contracts_hold_and_what_breaks_one_is_named(copied: Path, name: str, line: str, said: str) -> None:
    """A room that no layer names, too."""
    assert broken(copied) == ""
    with (copied / name).open("a") as file:
        file.write(f"{line}\n")
    assert said in broken(copied)


def test_call_that_hands_the_model_on_is_counted(copied: Path) -> None:
    before = Library(copied).handed(architecture.NAMED["the model"])
    with (copied / "core" / "seeds.py").open("a") as file:
        file.write("from .shards import extras\n\n\ndef planted(model):\n    extras(model)\n")
    after = Library(copied).handed(architecture.NAMED["the model"])
    assert {*after} - {*before} == {("core.seeds", "core.shards", "extras")}


def test_names_that_an_owner_uses_are_listed(tmp_path: Path) -> None:
    """Those of a module inside the library, too."""
    (folder := tmp_path / "planted" / "src" / "package").mkdir(parents=True)
    lines = "import samebits as sb", "from samebits.core import seeds", "from .model import build", "sb.main(build)"
    (folder / "train.py").write_text("\n".join(lines))
    assert architecture.owners(tmp_path)[2:] == ["| planted | train.py | 4 | model | core.seeds, main |"]
