"""The judge is judged: library that is not as released is named, in receipts and by those who read them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clone import project_in
from support import PACKAGE, PROJECT

from samebits.address.address import LIST, code, core_files, core_stated
from samebits.address.judged import judged
from samebits.address.release import files, library
from samebits.base.project import Project
from samebits.core import ARITHMETIC, arithmetic
from samebits.core.errors import UserError

OURS = Project(PROJECT / "src" / PACKAGE)
VERSION = OURS.template
AS_RELEASED = f"core: arithmetic {ARITHMETIC}, as released"


def receipt_of(project: Project) -> dict[str, Any]:
    """Return what a receipt of this project states of its library."""
    digests = code(project)
    core = {"preimage": {"core": core_stated(project, digests)}, "core_files": core_files(digests)}
    return {"library": library(project).stated(), **core}


def of_library(stated: object) -> dict[str, Any]:
    """Return a receipt with another statement on the library."""
    return receipt_of(OURS) | {"library": stated}


@pytest.fixture
def copy(tmp_path: Path) -> Project:
    """A project with this library, to be tampered with."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(OURS.library, tmp_path / "vendor" / "samebits", ignore=ignored)
    shutil.copyfile(PROJECT / "pyproject.toml", tmp_path / "pyproject.toml")
    return project_in(tmp_path)


def append(path: Path, text: str = "# a remark\n") -> None:
    with path.open("a") as file:
        file.write(text)


def test_library_as_released_is_judged_so():
    stated = library(OURS).stated()
    assert stated["modified"] == [] and stated["template"] == VERSION != "unknown"
    line = f"library as released by template {VERSION} ({stated['digest'][:16]})"
    assert judged(OURS, receipt_of(OURS)) == [line, AS_RELEASED]


def test_page_on_receipts_shows_the_library_as_released():
    """It is a file of the library, so it cannot contain the library's digest."""
    seen, said = (OURS.library / "docs" / "receipts.md").read_text(), judged(OURS, receipt_of(OURS))
    assert f"\n{said[1]}\n" in seen
    masked = [re.sub(r"(?m)^(library as released .*) \([0-9a-f]{16}\)$", r"\1", text) for text in (said[0], seen)]
    assert masked[0] != said[0] and masked[1].count(f"\n{masked[0]}\n") == 2


# ---- core


def test_core_of_the_project_is_listed_with_its_arithmetic():
    """The command `tools/released.py --list` adds the row."""
    listed = arithmetic.releases(OURS.library)
    assert listed[arithmetic.digest(core_files(code(OURS)))] == ARITHMETIC
    assert set(listed.values()) == {*range(1, ARITHMETIC + 1)}


def test_core_of_another_release_is_known_if_the_list_has_it(copy: Project):
    """A later release repeats the rows of earlier ones."""
    receipt = receipt_of(OURS)
    append(copy.library / "core" / "step.py")
    assert judged(copy, receipt)[1] == AS_RELEASED
    (copy.library / arithmetic.RELEASES).write_text("")
    digest = arithmetic.digest(core_files(code(OURS)))[:16]
    line = f"core: arithmetic {ARITHMETIC} (files {digest}), says the receipt; this project does not know this release"
    assert judged(copy, receipt)[1] == line


def test_claim_of_another_arithmetic_is_found():
    receipt = receipt_of(OURS) | {"preimage": {"core": {"arithmetic": ARITHMETIC + 1}}}
    line = f"core: arithmetic {ARITHMETIC + 1}, says the receipt; but its files are released with arithmetic"
    assert judged(OURS, receipt)[1] == f"{line} {ARITHMETIC}: altered"


def test_claim_without_files_is_not_confirmed():
    receipt = receipt_of(OURS)
    del receipt["core_files"]
    assert judged(OURS, receipt)[1].endswith("says the receipt; this project does not know this release")


def test_edited_core_is_named_apart(copy: Project):
    append(copy.library / "core" / "step.py")
    append(copy.library / "run.py")
    receipt = receipt_of(copy)
    assert receipt["library"]["modified"] == ["core/step.py", "run.py"]
    line = f"core: edited {arithmetic.digest(core_files(code(copy)))[:8]}"
    assert judged(OURS, receipt)[1] == f"{line}; not the core of this project"
    assert judged(copy, receipt)[1] == f"{line}; the same as the core of this project"


def test_core_of_an_earlier_release_is_described():
    """Its content address states all files, and none holds an integer."""
    files = {"step.py": "0" * 64}
    digest = arithmetic.digest(files)[:8]
    line = f"core: earlier release {digest}; not the core of this project"
    assert judged(OURS, receipt_of(OURS) | {"preimage": {"core": files}})[1] == line
    assert len(judged(OURS, receipt_of(OURS) | {"preimage": {}})) == 1


# ---- what was modified is named


def unlisted(path: Path) -> None:
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "cli.py" not in line))


def another_digest(path: Path) -> None:
    path.write_text(re.sub(r"(?m)^.{64}(?=  cli\.py$)", "0" * 64, path.read_text()))


TAMPERED: dict[str, tuple[str, Callable[[Path], object], str]] = {  # the file, its change, and what is named then
    "edited": ("analysis/verify.py", append, "analysis/verify.py"),
    "added": ("analysis/new.py", append, "analysis/new.py"),
    "removed": ("analysis/verify.py", Path.unlink, "analysis/verify.py"),
    "bytecode beside sources": ("analysis/verify.pyc", append, "analysis/verify.pyc"),
    "line of the list": (LIST, another_digest, "cli.py"),
    "line less": (LIST, unlisted, "cli.py"),
    "line that says nothing": (LIST, lambda path: append(path, "as released, believe me\n"), LIST),
    "no list": (LIST, Path.unlink, LIST),
    "empty list": (LIST, lambda path: path.write_text(""), LIST),
}


@pytest.mark.parametrize("tampered", TAMPERED)
def test_modification_is_named_by_the_receipt_and_by_the_judge(copy: Project, tampered: str):
    file, change, name = TAMPERED[tampered]
    change(copy.library / file)
    stated = library(copy).stated()
    assert stated["modified"] == [name]
    seen = stated["digest"][:16]
    assert judged(OURS, of_library(stated))[0] == f"library of template {VERSION} ({seen}) with modified files: {name}"
    assert judged(copy, receipt_of(OURS))[2:] == [f"this project judges with modified library: {name}"]


def test_many_modified_files_are_counted(copy: Project):
    """As with line ends of another system."""
    paths = sorted(copy.library.rglob("*.py"))
    for path in paths:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    stated = library(copy).stated()
    assert len(stated["modified"]) == len(paths)
    sentence, _, own = judged(copy, of_library(stated))
    more = f"{', '.join(stated['modified'][:5])} and {len(paths) - 5} more"
    assert sentence.endswith(f"with modified files: {more}") and own.endswith(f"modified library: {more}")


def test_what_changes_no_file_of_the_library_is_no_modification(copy: Project, tmp_path: Path):
    (copy.library / "__pycache__").mkdir()
    append(copy.library / "__pycache__" / "gone.pyc")
    append(copy.library / "analysis" / "verify.py~")
    copy.package.mkdir(parents=True)
    append(copy.package / "model.py")
    listing = copy.library / LIST
    listing.write_bytes(listing.read_bytes().replace(b"\n", b"\r\n"))
    shutil.move(copy.library / "cli.py", tmp_path / "cli.py")
    (copy.library / "cli.py").symlink_to(tmp_path / "cli.py")
    assert library(copy) == library(OURS)
    append(tmp_path / "cli.py")
    assert library(copy).modified == ("cli.py",)


def test_folder_that_is_a_link_is_refused(copy: Project, tmp_path: Path):
    shutil.move(copy.library / "analysis", tmp_path / "analysis")
    (copy.library / "analysis").symlink_to(tmp_path / "analysis")
    with pytest.raises(UserError, match="analysis: a link to a folder"):
        library(copy)


# ---- what a receipt claims


def test_claim_of_no_modification_with_another_digest_is_found():
    stated = library(OURS).stated() | {"digest": "0" * 64}
    sentence = judged(OURS, of_library(stated))[0]
    assert sentence.startswith(f"library {'0' * 16} is not as released by template {VERSION} (")
    assert sentence.endswith("though the receipt names no modified file")


def test_code_and_list_edited_together_are_found_by_who_has_another_list(copy: Project):
    """Within one project nobody can know; the digest is printed so that people can compare it."""
    append(copy.library / "analysis" / "verify.py")
    lines = (f"{sha256}  {name}\n" for name, sha256 in files(copy.library).items())
    (copy.library / LIST).write_text("".join(lines))
    stated = library(copy).stated()
    assert judged(copy, of_library(stated))[0] == f"library as released by template {VERSION} ({stated['digest'][:16]})"
    assert "is not as released" in judged(OURS, of_library(stated))[0]


def test_receipt_of_another_template_cannot_be_checked_here():
    stated = library(OURS).stated() | {"template": "0.0.1", "digest": "1" * 64}
    sentence = judged(OURS, of_library(stated))[0]
    assert sentence.startswith(f"library as released by template 0.0.1 ({'1' * 16}), says the receipt; this project is")
    assert f"of template {VERSION} and cannot check it" in sentence


def test_lost_list_cannot_check_a_receipt(copy: Project):
    (copy.library / LIST).unlink()
    sentence = judged(copy, receipt_of(OURS))[0]
    assert sentence.endswith(f"says the receipt; {LIST} is lost or damaged here, so that it cannot be checked")


@pytest.mark.parametrize(
    "stated", [None, {}, "as released", [], {"template": "0.1.0", "digest": "0", "modified": None}]
)
def test_receipt_that_states_nothing_readable_is_told(stated: object):
    assert judged(OURS, of_library(stated)) == ["library: the receipt states nothing of it", AS_RELEASED]


FORGED = "0.1.0\nweights are as stated"


@pytest.mark.parametrize("forged", [{"template": FORGED}, {"digest": FORGED}, {"modified": [FORGED]}])
def test_statement_cannot_pass_for_lines_of_the_judge(forged: dict[str, object]):
    whole = library(OURS).stated()
    assert judged(OURS, of_library(whole | forged))[0] == "library: the receipt states something unreadable of it"


def test_project_without_a_version_says_so(copy: Project):
    for text in ("", "[tool]\nsamebits = 1\n", "no toml"):
        (copy.root / "pyproject.toml").write_text(text)
        assert library(copy).template == "unknown"
