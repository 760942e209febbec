"""Files are hashed in parallel and remembered: no change of a file goes unseen, and no bad memory is believed."""

import hashlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import PROJECT, python

from samebits.address import hashing, manifest
from samebits.config.settings import Data
from samebits.core.errors import UserError

FILES = {"a.png": b"first", "b/c.png": b"second", "b/d.png": b"third", ".hidden": b""}
ALL = sorted(Path(name).name for name in FILES)
ODD = ["-n", "a b", "a\nb", "back\\slash", "return\r", "é", os.fsdecode(b"\xff\xfe"), "\uffff", "😀"]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A memory of the test's own, and a clock that lets files be old at once."""
    monkeypatch.setattr(hashing, "MEMORY", tmp_path / "build" / "hashes")
    monkeypatch.setattr(hashing, "STEP", -(10**18))
    return hashing.MEMORY


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A dataset in a folder."""
    return fill(tmp_path / "raw")


def fill(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def requested(raw: Path, check: str = "remembered", sha256: str = "") -> Data:
    """The keys that ask for a dataset; as it is now, unless told otherwise."""
    sha256 = sha256 or manifest.digest(hashing.entries(raw)) or "0" * 64
    return Data(raw=str(raw), read="prepared", sha256=sha256, check=check, prepared=str(raw.parent / "prepared"))


def refusal(data: Data) -> str:
    with pytest.raises(UserError) as refused:
        manifest.require_raw(data)
    assert "\n" not in str(refused.value)
    return str(refused.value)


WasRead = Callable[[], list[str]]


@pytest.fixture
def was_read(monkeypatch: pytest.MonkeyPatch) -> WasRead:
    """The names of the files that were read since it was asked last."""
    names: list[str] = []
    original = hashing._read

    def read(path: str, *others: object) -> hashing.Entry:
        names.append(Path(path).name)
        return original(path, *others)

    def message() -> list[str]:
        found = sorted(names)
        names.clear()
        return found

    monkeypatch.setattr(hashing, "_read", read)
    return message


def reads(data: Data, was_read: WasRead) -> list[str]:
    """Check a dataset; the names of the files that this read."""
    was_read()
    manifest.require_raw(data)
    return was_read()


# ---- one hash for a folder


def test_hash_of_a_folder_is_that_of_what_sha256sum_prints(raw: Path):
    for name in ODD:
        (raw / name).write_bytes(os.fsencode(name))
    (raw / "link").symlink_to(raw / "a.png")  # DVC makes such; the content counts
    (raw / "empty" / "folder").mkdir(parents=True)  # neither git nor DVC keeps one
    command = r"find -L . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum --"
    printed = subprocess.run(["bash", "-c", command], cwd=raw, capture_output=True, check=True).stdout
    held = hashing.entries(raw, {})
    if b"return\r" in printed:  # coreutils before 9.1 writes this mark as it is
        printed = printed.replace(b"return\r", b"return\\r").replace(
            hexadecimal(b"return\r"), b"\\" + hexadecimal(b"return\r")
        )
    assert manifest.listing(held) == printed and len(held) == len(FILES) + len(ODD) + 1
    manifest.require_raw(requested(raw, sha256=hashlib.sha256(printed).hexdigest()))


def hexadecimal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def test_command_prints_the_hash_that_params_yaml_wants(raw: Path):
    words = "-m", "samebits", "hash-data", "--set", f"data.raw={raw}"
    one, all_of_them = (python(*words, *more) for more in ([], ["--files"]))
    assert one.stdout.strip() == requested(raw).sha256 == hashlib.sha256(all_of_them.stdout.encode()).hexdigest()
    assert len(all_of_them.stdout.splitlines()) == len(FILES)
    missing = "missing. It lies outside the project, where DVC brings nothing: put it there"
    for wrong, said in ((raw / "nowhere", missing), (raw.parent / "empty", "an empty folder. Put the dataset there")):
        (raw.parent / "empty").mkdir(exist_ok=True)
        done = python(*words[:-1], f"data.raw={wrong}")
        assert (done.returncode, done.stderr) == (2, f"{wrong}: {said}\n")


def test_hash_does_not_depend_on_threads_or_order(raw: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(300):
        (raw / f"{number}.png").write_bytes(b"%d" % (number % 7))
    alone = hashing.entries(raw)
    for cpus in (1, 3, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cpus=cpus: set(range(cpus)))
        assert digests(hashing.entries(raw, {})) == digests(alone)


def digests(held: hashing.Entries) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in held.items()}


# ---- what is refused


def link_to_a_folder(raw: Path) -> None:
    (raw / "b").rename(raw.parent / "b")
    (raw / "b").symlink_to(raw.parent / "b")


PLANTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda raw: (raw / "a.png").unlink(),
    "altered": lambda raw: (raw / "a.png").write_bytes(b"other"),
    "added": lambda raw: (raw / "e.png").touch(),
    "odd": lambda raw: (raw / "a\nb").touch(),
    "renamed": lambda raw: (raw / "a.png").rename(raw / "z.png"),
    "gone": lambda raw: raw.rename(raw.parent / "gone"),
    "link to a folder": link_to_a_folder,
    "pipe": lambda raw: os.mkfifo(raw / "pipe"),
    "itself a link": lambda raw: raw.rename(raw.parent / "there") and raw.symlink_to(raw.parent / "there"),
    "a file": lambda raw: raw.rename(raw.parent / "there") and raw.write_bytes(b"other"),
}
REPORTED = {
    "missing": "/a.png: missing; wanted SHA-256 {first}. Restore it: git",
    "altered": "/a.png: SHA-256 {other} (5 bytes) seen, {first} wan",
    "added": ": e.png seen, but not among the files of SHA-256 {sha256}: a",
    "odd": ": 'a\\nb' seen, but not among the files of SHA-256 {sha256}: a",
    "renamed": "/a.png: missing; wanted SHA-256 {first}. {raw}: z.png seen, but not among",
    "gone": ": missing; wanted SHA-256 {sha256}. It lies outside",
    "link to a folder": "/b: a link to a folder seen, files wanted: copy them there",
    "pipe": "/pipe: neither a file nor a folder: remove it",
    "itself a link": ": a link to a folder seen, a folder wanted: name that one as data.raw: {raw.parent}/there",
    "a file": ": SHA-256 {other} (5 bytes) seen, {sha256} wanted: it is truncated or altered. Restore it: git",
}


@pytest.mark.parametrize("check", ["remembered", "every_byte"])
@pytest.mark.parametrize("fault", REPORTED)
def test_folder_that_is_not_as_it_was_is_refused_by_name(raw: Path, fault: str, check: str):
    data = requested(raw, check)
    manifest.require_raw(data)
    PLANTS[fault](raw)
    first, other = (hashlib.sha256(content).hexdigest() for content in (b"first", b"other"))
    for _ in range(2):  # what is remembered stays
        assert refusal(data).startswith(
            str(raw) + REPORTED[fault].format(raw=raw, first=first, other=other, sha256=data.sha256)
        )


def test_many_faults_are_counted(raw: Path):
    for number in range(20):
        (raw / f"{number:02}.png").write_bytes(b"%d" % number)
    data = requested(raw)
    manifest.require_raw(data)
    for number in range(18):
        (raw / f"{number:02}.png").unlink() if number < 9 else (raw / f"{number:02}.png").write_bytes(b"x")
        (raw / f"{number:02}.jpg").touch()
    said = refusal(data)
    assert "00.png: missing; wanted SHA-256 " in said
    assert "; likewise 01.png, 02.png, 03.png, 04.png, 05.png and" in said
    assert "; likewise 10.png, 11.png, 12.png, 13.png, 14.png and 3 more" in said
    assert ": 00.jpg, 01.jpg, 02.jpg, 03.jpg, 04.jpg and 13 more seen, but not among" in said


def test_folder_that_nobody_remembers_is_refused_as_a_whole(raw: Path):
    data = requested(raw)
    (raw / "a.png").unlink()
    said = (
        f"of the listing of 3 files (11 bytes) seen, {data.sha256} wanted: files are missing, altered or added, and no"
    )
    assert said in refusal(data)
    for path in [path for path in raw.rglob("*") if path.is_file()]:
        path.unlink()
    assert refusal(data).startswith(f"{raw}: empty, {data.sha256} wanted")


def test_folder_in_the_place_of_a_file_is_refused(tmp_path: Path):
    file = tmp_path / "raw"
    file.write_bytes(b"first")
    data = requested(file)
    manifest.require_raw(data)
    file.unlink()
    fill(file)
    seen = f"{file}: SHA-256 {requested(file).sha256} of the listing of 4 files (16 bytes) seen"
    assert f"{seen}, {data.sha256}" in refusal(data)


# ---- what is remembered


def test_known_files_are_not_read_again(raw: Path, was_read: WasRead):
    data = requested(raw)
    assert (reads(data, was_read), reads(data, was_read)) == (ALL, [])
    assert reads(data.model_copy(update={"check": "every_byte"}), was_read) == ALL


def in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"F")


def by_another(path: Path) -> None:
    path.with_name("new").write_bytes(b"First")
    path.with_name("new").rename(path)


def linked(path: Path) -> None:
    (path.parents[1] / "elsewhere").write_bytes(b"First")
    path.unlink()
    path.symlink_to(path.parents[1] / "elsewhere")


@pytest.mark.parametrize("change", [in_place, by_another, linked])
def test_file_changed_with_its_size_and_date_kept_is_found(
    raw: Path, change: Callable[[Path], None], was_read: WasRead
):
    path = raw / "a.png"
    data, before = requested(raw), path.stat()
    manifest.require_raw(data)
    was_read()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert refusal(data).startswith(f"{path}: SHA-256 {hashlib.sha256(b'First').hexdigest()} (5 bytes) seen, ")
    assert was_read() == ["a.png"]


def hide(raw: Path, name: str, content: bytes) -> None:
    """Change a file on a file system that hides it: its entry in memory is as if it had not changed."""
    before = hashing.recall(raw)
    (raw / name).write_bytes(content)
    size, changed, inode_changed, inode = hashing._identity((raw / name).stat())
    entry = hashing.Entry(size, changed, inode_changed, inode, before[name].sha256)
    hashing.remember(raw, before | {name: entry})


def test_byte_that_the_file_system_hides_is_found_by_reading_every_byte(raw: Path):
    data = requested(raw)
    manifest.require_raw(data)
    hide(raw, "a.png", b"First")
    manifest.require_raw(data)  # as remembered
    message = f"{raw}/a.png: SHA-256 {hashlib.sha256(b'First').hexdigest()} (5 bytes) seen"
    assert refusal(data.model_copy(update={"check": "every_byte"})).startswith(message)
    assert refusal(data).startswith(message)  # from then on by either


def test_prepared_files_are_remembered_by_the_same_rules(raw: Path, was_read: WasRead):
    """A changed byte that is hidden is found by reading every byte; each checkpoint is read in any case."""
    data = requested(raw)
    folder = fill(Path(data.prepared))
    manifest.write(folder, requested=data)
    was_read()
    manifest.require_prepared(data)
    assert was_read() == []
    hide(folder, "a.png", b"First")
    manifest.require_prepared(data)
    for way in (
        lambda: manifest.require_prepared(data.model_copy(update={"check": "every_byte"})),
        lambda: manifest.require_prepared(data),  # from then on
        lambda: manifest.require_complete(folder),  # as a checkpoint is read
    ):
        with pytest.raises(UserError, match=r"a.png: SHA-256 \w+ \(5 bytes\) seen"):
            way()


def test_file_that_has_just_changed_is_not_trusted(raw: Path, monkeypatch: pytest.MonkeyPatch, was_read: WasRead):
    """Another change within the same step of the clock would leave all dates as they are."""
    data = requested(raw)
    for step, again in ((3600 * 10**9, ALL), (-(10**18), [])):
        monkeypatch.setattr(hashing, "STEP", step)
        assert (reads(data, was_read), reads(data, was_read)) == (ALL, again)


def test_file_that_changes_while_it_is_read_is_not_trusted(raw: Path, monkeypatch: pytest.MonkeyPatch):
    original = hashing.FileIO

    def touched(path: str) -> object:
        os.utime(path) if path == str(raw / "a.png") else None
        return original(path)

    monkeypatch.setattr(hashing, "FileIO", touched)
    held = hashing.entries(raw, {})
    assert [name for name, entry in held.items() if entry.inode_changed == hashing.NEVER] == ["a.png"]


def with_bytes(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def outside(path: Path) -> None:
    path.rename(path.parents[2] / "outside")
    path.symlink_to(path.parents[2] / "outside")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def another(path: Path) -> None:
    """The memory of another folder with the same names, under this one's name."""
    other = fill(path.parents[2] / "other")
    hashing.remember(other, hashing.entries(other, {}))
    hashing._place(other).replace(path)


BAD: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: with_bytes(path, lambda text: text[:-9]),
    "a bit": lambda path: with_bytes(path, lambda text: text[:-9] + bytes([text[-9] ^ 1]) + text[-8:]),
    "garbage": lambda path: path.write_bytes(os.urandom(999)),
    "sealed, no JSON": lambda path: sealed(path, b"{"),
    "sealed, other JSON": lambda path: sealed(path, b'{"a.png": 1}'),
    "sealed, a list": lambda path: sealed(path, b"[[1]]"),
    "sealed, too few columns": lambda path: sealed(path, b'[["a.png"], [1], [2]]'),
    "sealed, of other lengths": lambda path: sealed(path, b'[["a.png"], [1], [2], [3], [4], ["5", "6"]]'),
    "sealed, names that are none": lambda path: sealed(path, b'[[[1]], [1], [2], [3], [4], ["5"]]'),
    "link": outside,
    "pipe": pipe,
    "folder": folder,
    "another's": another,
    "no folder": lambda path: (path.unlink(), path.parent.rmdir(), path.parent.write_bytes(b"")),
}


def sealed(path: Path, text: bytes) -> None:
    path.write_bytes(hashing._seal(path.parents[2] / "raw", text) + b"\n" + text)


@pytest.mark.parametrize("fault", BAD)
def test_bad_memory_is_not_believed(raw: Path, fault: str, was_read: WasRead):
    """All files are read again; a fault among them is found, and the memory mended where that is possible."""
    data = requested(raw)
    manifest.require_raw(data)
    BAD[fault](hashing._place(raw))
    again = ALL if fault in ("folder", "no folder") else []
    assert (reads(data, was_read), reads(data, was_read)) == (ALL, again)
    (raw / "a.png").write_bytes(b"other")
    assert f"{data.sha256} wanted" in refusal(data) or f"{raw}/a.png: SHA-256 " in refusal(data)
    assert not [path for path in raw.parent.glob("build/hashes/*") if path.name.startswith("tmp")]
    if fault == "link":
        assert not hashing._place(raw).is_symlink()


def test_copy_of_the_project_believes_none_of_its_entries(raw: Path, was_read: WasRead):
    """Its memory came along with its data, all dates kept."""
    data = requested(raw)
    manifest.require_raw(data)
    copy = raw.parent / "copy"
    subprocess.run(["cp", "--archive", raw, copy], check=True)
    hashing.remember(copy, hashing.recall(raw))
    assert reads(requested(copy, sha256=data.sha256), was_read) == ALL


def test_memory_that_cannot_be_written_costs_speed_alone(raw: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a read-only file system."""
    monkeypatch.setattr(hashing, "MEMORY", Path("/proc/self/hashes"))
    data = requested(raw)
    manifest.require_raw(data)
    (raw / "a.png").unlink()
    assert f"{data.sha256} wanted" in refusal(data)


CHECKS = """
import sys
from pathlib import Path
from samebits.address import hashing, manifest
hashing.MEMORY, hashing.STEP = Path(sys.argv[1]), -(10**18)
for _ in range(30):
    hashing._place(Path(sys.argv[2])).unlink(missing_ok=True)
    manifest.require_sha256(Path(sys.argv[2]), sys.argv[3], "", "remembered")
"""


def test_processes_that_remember_at_once_do_not_disturb_each_other(raw: Path, memory: Path):
    data = requested(raw)
    program = CHECKS.format(package=hashing.__name__.partition(".")[0])
    words = [sys.executable, "-c", program, memory, raw, data.sha256]
    all_of_them = [subprocess.Popen(words, cwd=PROJECT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(process.communicate()[1], process.returncode) for process in all_of_them] == [("", 0)] * 3
    assert digests(hashing.recall(raw)) == digests(hashing.entries(raw))
    assert len(list(memory.iterdir())) == 1


def test_interrupt_waits_for_the_files_in_hand_alone(raw: Path, monkeypatch: pytest.MonkeyPatch, was_read: WasRead):
    for number in range(500):
        (raw / f"{number}.png").touch()
    drained, read = threading.Event(), hashing._read

    def interrupted(parts: object, **options: object) -> None:
        raise KeyboardInterrupt

    def drain(turns: Iterator[object], maxlen: int) -> None:
        deque(turns, maxlen)
        drained.set()

    monkeypatch.setattr(hashing, "wait", interrupted)
    monkeypatch.setattr(hashing, "deque", drain)
    monkeypatch.setattr(hashing, "_read", lambda *file: drained.wait() and read(*file))
    with pytest.raises(KeyboardInterrupt):
        hashing.entries(raw, {})
    assert len(was_read()) <= 2 * len(os.sched_getaffinity(0))


# ---- many files


def test_manifest_of_many_files_states_one_hash(raw: Path, monkeypatch: pytest.MonkeyPatch):
    """The address holds that alone; what is at fault is named all the same."""
    monkeypatch.setattr(manifest, "FEW", 3)
    data = requested(raw)
    folder = fill(Path(data.prepared))
    written = manifest.write(folder, requested=data)
    assert written["files"] == [{"path": ".", "size": 16, "sha256": data.sha256}]
    assert manifest.require_prepared(data) == written == manifest.write(folder, requested=data)
    (folder / "a.png").write_bytes(b"other")
    for check in (None, "remembered", "every_byte"):
        with pytest.raises(UserError, match=r"^\S+/prepared/a.png: SHA-256 \w+ \(5 bytes\) seen, .* Prepare the data"):
            manifest.require_complete(folder, check=check)
    (folder / "a.png").write_bytes(b"first")
    manifest.require_prepared(data)


def test_prepared_file_whose_name_no_json_holds_is_refused(raw: Path):
    data = requested(raw)
    fill(Path(data.prepared))
    (Path(data.prepared) / ODD[6]).touch()
    with pytest.raises(UserError, match=r"'\\udcff\\udcfe': names in UTF-8 wanted; have prepare.py choose others"):
        manifest.write(Path(data.prepared), requested=data)
