"""Data: what is missing, truncated or altered stops the run, with its name and both hashes."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from clone import command
from project.config import Config
from safetensors.numpy import save_file
from support import PROJECT, prepare_here, python

from samebits.address import manifest
from samebits.core.errors import UserError
from samebits.guards.emptied import prepared_anew

FILES = {"a.npy": b"first" * 100, "b.npy": b"second" * 100, "deep/c.npy": b"third"}


def make(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(FILES[name])
    manifest.write(folder)
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder of files with its manifest."""
    return make(tmp_path / "whole", list(FILES))


def test_manifest_lists_path_size_and_hash_of_every_file(whole: Path):
    assert (
        manifest.require_complete(whole)
        == json.loads((whole / manifest.NAME).read_text())
        == {
            "files": [
                {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for name, data in sorted(FILES.items())
            ]
        }
    )


def test_neither_order_nor_writing_twice_changes_it(whole: Path, tmp_path: Path):
    other = make(tmp_path / "other", list(reversed(FILES)))
    for _ in range(2):
        assert (whole / manifest.NAME).read_bytes() == (other / manifest.NAME).read_bytes()
        manifest.write(whole)


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FAULTS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "truncated": truncate,
    "altered": flip_one_bit,
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FILES)
def test_file_that_is_not_whole_is_refused(whole: Path, name: str, fault: str):
    FAULTS[fault](whole / name)
    with pytest.raises(UserError) as refused:
        manifest.require_complete(whole)
    wanted = hashlib.sha256(FILES[name]).hexdigest()
    if fault == "missing":
        message = f"{whole / name}: missing; wanted SHA-256 {wanted}. "
    else:
        data = (whole / name).read_bytes()
        seen = hashlib.sha256(data).hexdigest()
        message = f"{whole / name}: SHA-256 {seen} ({len(data)} bytes) seen, {wanted} wanted"
    assert str(refused.value).startswith(message) and len(str(refused.value).splitlines()) == 1


def test_missing_or_broken_manifest_is_refused(whole: Path):
    truncate(whole / manifest.NAME)  # only the newline
    manifest.require_complete(whole)
    truncate(whole / manifest.NAME)
    with pytest.raises(UserError, match=r"not JSON: .* truncated or altered. Prepare the data again: make repro"):
        manifest.require_complete(whole)
    (whole / manifest.NAME).unlink()
    with pytest.raises(UserError, match="missing"):
        manifest.require_complete(whole)


@pytest.mark.parametrize("name", ["d.npy", ".hidden", "deep/d.npy", "new/d.npy"])
def test_file_added_later_is_refused(whole: Path, name: str):
    (whole / name).parent.mkdir(exist_ok=True)
    (whole / name).write_bytes(b"more")
    with pytest.raises(UserError, match=f"^{whole}: {name} seen, but not in manifest.json: added later. Prepare"):
        manifest.require_complete(whole)
    (whole / name).unlink()
    manifest.require_complete(whole)


def test_link_to_a_folder_is_refused(whole: Path, tmp_path: Path):
    """Before the manifest is written, and after it."""
    (whole / "deep").rename(tmp_path / "deep")
    (whole / "deep").symlink_to(tmp_path / "deep")
    for use in (manifest.write, manifest.require_complete):
        with pytest.raises(UserError, match="deep: a link to a folder seen, files wanted: copy them there"):
            use(whole)


def test_data_prepared_with_other_keys_are_refused(config: Config, prepared: Path, tmp_path: Path):
    """They would train, and the address would state keys that no data were prepared with."""
    data = config.data.model_copy(update={"prepared": str(prepared)})
    assert manifest.require_prepared(data)["requested"] == {
        "read": "prepared",
        "sha256": data.sha256,
        "test_percent": 20,
    }
    with pytest.raises(UserError, match=r"prepared with other keys of `data` \(test_percent: 20 there, 30 here\)"):
        manifest.require_prepared(data.model_copy(update={"test_percent": 30}))
    shutil.copytree(prepared, tmp_path / "silent")
    manifest.write(tmp_path / "silent")
    with pytest.raises(
        UserError, match=r"does not say which keys .* End prepare.py with manifest.write\(folder, requested"
    ):
        manifest.require_prepared(data.model_copy(update={"prepared": str(tmp_path / "silent")}))


def test_prepared_files_of_this_project_verify_and_repeat(config: Config, prepared: Path, tmp_path: Path):
    again = tmp_path / "again"
    again.mkdir()
    (again / "digits.npy").write_bytes(b"of an older prepare.py")
    manifest.write(again)
    done = python("-m", "samebits", "prepare", "--set", f"data.prepared={again}", "--set", "seed=99")
    assert done.returncode == 0, done.stderr
    assert manifest.require_complete(again) == manifest.require_complete(
        prepared
    )  # the split does not depend on the seed
    sizes = {entry["path"]: entry["size"] for entry in manifest.read(prepared)["files"]}
    assert set(sizes) == {f"{part}-{what}.npy" for part in ("train", "test") for what in ("images", "labels")}


def by_rename(folder: Path) -> None:
    (folder / "a.part").write_bytes(b"a")
    (folder / "a.part").rename(folder / "a.npy")


def by_a_library_in_c(folder: Path) -> None:
    save_file({"a": np.zeros(2)}, folder / "a.safetensors")


def by_another_process(folder: Path) -> None:
    subprocess.run(["cp", PROJECT / "params.yaml", folder / "a.yaml"], check=True)


def in_a_folder(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "a.npy").write_bytes(b"a")


def by_a_link(folder: Path) -> None:
    (folder / "a.npy").symlink_to(PROJECT / "params.yaml")


@pytest.mark.parametrize("linked", [False, True])
def test_manifest_lists_what_prepare_wrote_and_nothing_older(config: Config, tmp_path: Path, linked: bool):
    """However files are written, and where the folder is a link; what an older preparation wrote goes."""
    folder, place = tmp_path / "prepared", tmp_path / "disk" if linked else tmp_path / "prepared"
    place.mkdir()
    if linked:
        folder.symlink_to(place)
    for number, write in enumerate((by_rename, by_a_library_in_c, by_another_process, in_a_folder, by_a_link)):
        with prepared_anew(folder):
            assert list(folder.iterdir()) == []
            write(folder)
            manifest.write(folder, requested=config.data)
        (listed,) = manifest.require_complete(folder)["files"]
        assert (folder / listed["path"]).is_file() and folder.is_symlink() == linked, number
        assert [path.name for path in place.parent.glob(".*")] == []


def test_preparation_that_fails_or_is_killed_loses_nothing(whole: Path):
    before = contents(whole)

    def killed() -> None:
        (whole / "new.npy").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), prepared_anew(whole):
        killed()
    assert contents(whole) == before
    whole.rename(whole.with_name(".whole.before"))
    whole.mkdir()
    (whole / "new.npy").write_bytes(b"half")
    with suppress(KeyboardInterrupt), prepared_anew(whole):  # the next one, after SIGKILL
        assert not any(whole.iterdir())
        raise KeyboardInterrupt
    assert contents(whole) == before


def test_file_that_no_preparation_wrote_is_refused_and_stays(whole: Path, tmp_path: Path):
    (whole / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"whole: notes.txt seen, which no preparation wrote"), prepared_anew(whole):
        raise AssertionError("it began")
    assert contents(tmp_path) == before
    (whole / "notes.txt").unlink()
    said = r"wrote nothing but manifest\.json, and 3 older files lie there"
    with pytest.raises(UserError, match=said), prepared_anew(whole):
        manifest.write(whole)
    assert contents(whole) == {path: data for path, data in before.items() if path.name != "notes.txt"}
    truncate(whole / manifest.NAME)
    truncate(whole / manifest.NAME)  # nobody knows what it listed: the remedy is to prepare again
    with prepared_anew(whole):
        by_rename(whole)
    assert {path.name for path in contents(whole)} == {"a.npy"}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def places(config: Config, tmp_path: Path, prepared: Path) -> dict[str, str]:
    """A copy of the dataset file, and of what was prepared from it."""
    shutil.copy(PROJECT / config.data.raw, tmp_path / "raw.csv.gz")
    shutil.copytree(prepared, tmp_path / "prepared")
    return {"raw": str(tmp_path / "raw.csv.gz"), "prepared": str(tmp_path / "prepared")}


@pytest.mark.parametrize("fault", FAULTS)
def test_prepare_refuses_a_bad_dataset_file_and_touches_nothing(
    config: Config, tmp_path: Path, places: dict[str, str], fault: str
):
    raw = Path(places["raw"])
    FAULTS[fault](raw)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=config.data.sha256) as refused:
        prepare_here(config.data.model_copy(update=places))

    way = "outside the project, where DVC brings nothing" if fault == "missing" else f"dvc checkout --force {raw}.dvc"
    assert f"{raw}: " in str(refused.value) and way in str(refused.value)
    assert fault == "missing" or manifest.sha256_file(raw) in str(refused.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("stage", "name", "message"),
    [
        ("prepare", "raw.csv.gz", "raw.csv.gz: SHA-256 {seen} "),
        ("train", "prepared/test-images.npy", "prepared/test-images.npy: SHA-256 {seen} "),
        ("evaluate", "", "run/model.safetensors: missing. Train first"),
    ],
)
def test_stage_ends_with_a_line_and_exit_code_2_and_touches_nothing(
    stage: str, name: str, message: str, config: Config, tmp_path: Path, places: dict[str, str]
):
    if name:
        flip_one_bit(tmp_path / name)
    before, seen = contents(tmp_path), manifest.sha256_file(tmp_path / (name or "raw.csv.gz"))
    words = [word for key, place in places.items() for word in ("--set", f"data.{key}={place}")]
    done = command(PROJECT, stage, *words, *(["--out", tmp_path / "run"] if stage != "prepare" else []))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"{tmp_path}/{message.format(seen=seen)}")
    assert stage != "prepare" or f"{config.data.sha256} wanted: it is truncated or altered. Restore" in done.stderr
    assert contents(tmp_path) == before and not (tmp_path / "run").exists()


def test_pointer_of_the_dataset_file_agrees_with_params_yaml(config: Config):
    """DVC's MD5 and params.yaml's SHA-256 speak of the same bytes."""
    raw = PROJECT / config.data.raw
    pointer = (PROJECT / f"{config.data.raw}.dvc").read_text()
    assert manifest.sha256_file(raw) == config.data.sha256
    assert f"md5: {hashlib.md5(raw.read_bytes()).hexdigest()}" in pointer
    assert f"size: {raw.stat().st_size}" in pointer
