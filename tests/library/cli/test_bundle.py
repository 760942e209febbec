"""`samebits bundle`: one archive with all that is needed to check a result, and nothing that was altered."""

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from clone import Forked, git, project_in, verb
from ruamel.yaml import YAML
from test_replay import SHOWN

from samebits.address.manifest import sha256_file
from samebits.analysis import archive
from samebits.analysis.bundle.bundle import bundled
from samebits.analysis.sources import KEPT, located
from samebits.core.errors import RunError, UserError
from samebits.start import trainings

NOWHERE = str


def members(content: bytes) -> dict[str, bytes]:
    """The files in an archive, by their names below its folder."""
    with tarfile.open(fileobj=io.BytesIO(content)) as held:
        names = [member for member in held if member.isreg()]
        return {member.name.partition("/")[2]: held.extractfile(member).read() for member in names}  # type: ignore[union-attr]


@pytest.fixture
def run(project: Path, tmp_path: Path) -> Path:
    """A finished run that a test may spoil."""
    return Path(shutil.copytree(project / "artifacts", tmp_path / "artifacts"))


@pytest.fixture(scope="module")
def held(project: Path) -> dict[str, bytes]:
    """The files in the archive of that run."""
    return members(bundled(project_in(project), [project / "artifacts"], "<html>", with_weights=False))


def test_archive_holds_what_it_names_and_is_the_same_bytes_again(project: Path, run: Path, held: dict[str, bytes]):
    ours = project_in(project)
    content = bundled(ours, [run], "<html>", with_weights=False)
    assert content == bundled(ours, [project / "artifacts"], "<html>", with_weights=False) and held == members(content)
    listed = dict(line.split("  ")[::-1] for line in held["SHA256SUMS"].decode().splitlines())
    assert listed == {name: hashlib.sha256(data).hexdigest() for name, data in held.items() if name != "SHA256SUMS"}
    assert {name.partition("/")[0] for name in held} == {
        "APPENDIX.md", "CITATION.cff", "SHA256SUMS", "report.html", "requirements", "runs",
    }  # fmt: skip
    for name in ("receipt.json", "code.patch", "metrics.json", "trace/steps.bin"):
        assert held[f"runs/1/{name}"] == (run / name).read_bytes()
    assert not [name for name in held if "safetensors" in name or "checkpoint" in name or "rank" in name]
    with_weights = members(bundled(ours, [run], "<html>", with_weights=True))
    assert with_weights["runs/1/model.safetensors"] == (run / "model.safetensors").read_bytes()


def test_appendix_and_citation_state_what_the_receipt_does(held: dict[str, bytes]):
    stated = json.loads(held["runs/1/receipt.json"])
    appendix, predicate = held["APPENDIX.md"].decode(), stated["predicate"]
    for value in (stated["subject"][0]["digest"]["sha256"], predicate["trace"], predicate["code"]["commit"]):
        assert value in appendix
    assert all(f"metric {name} | `{value}`" in appendix for name, value in predicate["metrics"].items())
    assert "samebits replay ARCHIVE --run-patch" in appendix and predicate["environment"]["class"] in appendix
    citation = YAML(typ="safe").load(held["CITATION.cff"])
    assert citation["cff-version"] == "1.2.0" and citation["commit"] == predicate["code"]["commit"]
    assert citation["authors"] and citation["title"]


def test_croissant_names_every_file_with_its_digest(project: Path, held: dict[str, bytes]):
    croissant = json.loads(held["runs/1/croissant.json"])
    predicate = json.loads(held["runs/1/receipt.json"])["predicate"]
    files = {each["contentUrl"]: each["sha256"] for each in croissant["distribution"]}
    raw = predicate["config"]["data.raw"]
    assert files.pop(raw) == predicate["config"]["data.sha256"] == sha256_file(project / raw)
    prepared = {entry["path"]: entry["sha256"] for entry in predicate["preimage"]["data"]["files"]}
    assert {Path(name).name: digest for name, digest in files.items()} == prepared
    named = {key: predicate["config"][f"data.{key}"] for key in ("license", "source")}
    assert {"license": croissant["license"], "source": croissant["isBasedOn"]} == named and all(named.values())


@pytest.mark.parametrize("name", ["model.safetensors", "metrics.json", "address.json", "trace/steps.bin", "code.patch"])
def test_run_that_was_altered_is_not_bundled(project: Path, run: Path, name: str):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[:-2] + b"7\n")
    with pytest.raises(RunError, match=f"{name}: (not as receipt.json|missing or altered)"):
        bundled(project_in(project), [run], "<html>", with_weights=True)
    if name == "model.safetensors":  # which an archive without weights does not speak for
        bundled(project_in(project), [run], "<html>", with_weights=False)


def test_run_that_cannot_be_made_again_is_refused(project: Path, run: Path):
    for path, words in (
        (run / "receipt.json", "no run directory"),
        (run / "trace", "the receipt of a finished run is"),
    ):
        with pytest.raises(UserError, match=words):
            bundled(project_in(project), [path], "", with_weights=False)


def test_locks_of_the_run_are_bundled_though_they_have_changed_since(project: Path, run: Path):
    lock = project / "requirements" / "train-cpu.txt"
    before = lock.read_bytes()
    lock.write_bytes(before + b"# moved on\n")
    try:
        held = members(bundled(project_in(project), [run], "<html>", with_weights=False))
    finally:
        lock.write_bytes(before)
    assert held["requirements/train-cpu.txt"] == before


def archived(path: Path, files: dict[str, bytes], **facts: Any) -> Path:
    """A tar archive with these members."""
    with tarfile.open(path, "w") as held:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in facts.items():
                setattr(member, key, value)
            held.addfile(member, io.BytesIO(content))
    return path


def test_hostile_archive_writes_nothing_but_the_record(tmp_path: Path):
    names = ["x/runs/1/receipt.json", "/x/runs/1/receipt.json.sig", "x/runs/2/run.json", "x/runs/1/evil.sh"]
    names += [f"x/runs/1/{way}" for way in ("../../../../evil", "run/../../evil", "trace/../../evil", "trace/a/b")]
    path = archived(tmp_path / "a.tar", dict.fromkeys(names, b"content"))
    folder = tmp_path / "out"
    folder.mkdir()
    archive.unpack(path, "1", folder, KEPT)
    assert [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()] == ["receipt.json"]
    assert {each.name for each in tmp_path.iterdir()} == {"a.tar", "out"}
    links = archived(tmp_path / "b.tar", {"x/runs/1/receipt.json": b""}, type=tarfile.SYMTYPE, linkname="/etc/passwd")
    archive.unpack(links, "1", folder, KEPT)
    assert not (folder / "receipt.json").is_symlink()


def test_run_in_an_archive_is_named(tmp_path: Path):
    files = {f"x/runs/{number}/receipt.json": str(number).encode() for number in (1, 2)}
    path = archived(tmp_path / "a.tar", files)
    for name, said in ((f"{path}", "1, 2 seen; name one"), (f"{path}:3", "run '3' asked for, 1, 2 seen")):
        with pytest.raises(UserError, match=said), located(name, NOWHERE):
            pass
    with located(f"{path}:2", NOWHERE) as folder:
        assert (folder / "receipt.json").read_text() == "2"
    whole = path.read_bytes()
    path.write_bytes(whole[:700])
    with pytest.raises(UserError), located(f"{path}:2", NOWHERE):
        pass


@pytest.mark.long
def test_archive_is_replayed_in_a_clone_of_the_repository(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its patch is shown, and run because the user says so."""
    monkeypatch.chdir(project)
    done = verb("bundle", "artifacts", "--out", tmp_path / "result.tar", project=project_in(project))
    assert done.exit_code == 0, done.output
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(project), str(clone))
    (clone / "data" / "raw").mkdir(parents=True, exist_ok=True)
    for raw in (project / "data" / "raw").iterdir():
        shutil.copyfile(raw, clone / "data" / "raw" / raw.name)
    monkeypatch.chdir(clone)
    monkeypatch.setattr(trainings, "run", Forked(tmp_path))
    words = tmp_path / "result.tar", "--run-patch", "--out", tmp_path / "again"
    done = verb("replay", *words, project=project_in(clone))
    assert done.exit_code == 0 and "REPRODUCED" in done.stdout and "\n".join(SHOWN) in done.stdout, done.output
