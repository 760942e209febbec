"""The judge is judged: library that is not as released is named, in receipts and by those who read them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from clone import project_in
from support import PACKAGE, PROJECT

from samebits.address.address import LIST, code, core, digest
from samebits.address.judged import judged
from samebits.address.release import files, library
from samebits.base.project import Project
from samebits.core.errors import UserError

OURS = Project(PROJECT / "src" / PACKAGE)
VERSION = OURS.template


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
    assert judged(OURS, stated) == [
        f"library as released by template {VERSION} ({stated['digest'][:16]})",
        f"core {stated['core']['digest'][:16]}, as released, says the receipt; the same as this project's",
    ]


def test_page_on_receipts_shows_the_library_as_released():
    """It is a file of the library, whose digest it cannot have; that of core is made anew with each release."""
    seen, said = (OURS.library / "docs" / "receipts.md").read_text(), judged(OURS, library(OURS).stated())
    assert f"\n{said[1]}\n" in seen
    masked = [re.sub(r"(?m)^(library as released .*) \([0-9a-f]{16}\)$", r"\1", text) for text in (said[0], seen)]
    assert masked[0] != said[0] and masked[1].count(f"\n{masked[0]}\n") == 2


def test_core_has_the_digest_that_it_has_in_the_content_address():
    stated = library(OURS).stated()["core"]
    assert stated == {"digest": digest(core(code(OURS))), "modified": []}


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
    assert judged(OURS, stated)[0] == f"library of template {VERSION} ({seen}) with modified files: {name}"
    assert stated["core"] == library(OURS).stated()["core"] | {"modified": [name] if name == LIST else []}
    whole = library(OURS).stated()
    assert judged(copy, whole)[2:] == [f"this project judges with modified library: {name}"]


def test_modified_core_is_named_apart(copy: Project):
    append(copy.library / "core" / "step.py")
    append(copy.library / "run.py")
    stated = library(copy).stated()
    assert stated["modified"] == ["core/step.py", "run.py"] and stated["core"]["modified"] == ["core/step.py"]
    seen, ours = (each.core[:16] for each in (library(copy), library(OURS)))
    said = f"core {seen}, with modified files: core/step.py, says the receipt; another than this project's ({ours})"
    assert seen != ours and judged(OURS, stated)[1] == said


def test_many_modified_files_are_counted(copy: Project):
    """As with line ends of another system."""
    paths = sorted(copy.library.rglob("*.py"))
    for path in paths:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    stated = library(copy).stated()
    assert len(stated["modified"]) == len(paths)
    sentence, _, own = judged(copy, stated)
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
    sentence = judged(OURS, stated)[0]
    assert sentence.startswith(f"library {'0' * 16} is not as released by template {VERSION} (")
    assert sentence.endswith("though the receipt names no modified file")


def test_code_and_list_edited_together_are_found_by_who_has_another_list(copy: Project):
    """Within one project nobody can know; the digest is printed so that people can compare it."""
    append(copy.library / "analysis" / "verify.py")
    lines = (f"{sha256}  {name}\n" for name, sha256 in files(copy.library).items())
    (copy.library / LIST).write_text("".join(lines))
    stated = library(copy).stated()
    assert judged(copy, stated)[0] == f"library as released by template {VERSION} ({stated['digest'][:16]})"
    assert "is not as released" in judged(OURS, stated)[0]


def test_receipt_of_another_template_cannot_be_checked_here():
    stated = library(OURS).stated() | {"template": "0.0.1", "digest": "1" * 64}
    sentence = judged(OURS, stated)[0]
    assert sentence.startswith(f"library as released by template 0.0.1 ({'1' * 16}), says the receipt; this project is")
    assert f"of template {VERSION} and cannot check it" in sentence


def test_lost_list_cannot_check_a_receipt(copy: Project):
    (copy.library / LIST).unlink()
    sentence = judged(copy, library(OURS).stated())[0]
    assert sentence.endswith(f"says the receipt; {LIST} is lost or damaged here, so that it cannot be checked")


@pytest.mark.parametrize(
    "stated", [None, {}, "as released", [], {"template": "0.1.0", "digest": "0", "modified": None}]
)
def test_receipt_that_states_nothing_readable_is_told(stated: object):
    assert judged(OURS, stated) == ["library: the receipt states nothing of it"]


FORGED = "0.1.0\nweights are as stated"


@pytest.mark.parametrize("forged", [{"template": FORGED}, {"digest": FORGED}, {"modified": [FORGED]}])
def test_statement_cannot_pass_for_lines_of_the_judge(forged: dict[str, object]):
    whole = library(OURS).stated()
    assert judged(OURS, whole | forged)[0] == "library: the receipt states something unreadable of it"
    if "template" not in forged:
        core = {"core": {"digest": "0", "modified": []} | forged}
        assert judged(OURS, whole | core)[1:] == ["core: the receipt states something unreadable of it"]


def test_receipt_of_a_release_without_a_core_states_nothing_of_it():
    stated = library(OURS).stated()
    del stated["core"]
    assert len(judged(OURS, stated)) == 1


def test_project_without_a_version_says_so(copy: Project):
    for text in ("", "[tool]\nsamebits = 1\n", "no toml"):
        (copy.root / "pyproject.toml").write_text(text)
        assert library(copy).template == "unknown"
