"""Checkpoints: what is read is what was taken, or is refused; a crash at any instant costs no older one."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from project.repro import checkpoint, manifest
from project.repro.checkpoint import Damaged, Saver, Snapshot, found, newest, put, read, take, write
from project.repro.errors import Failure
from torch import nn

ADDRESS = "a" * 64
FILES = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}

Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, betas=(0.8, 0.99)),
}


class Training:
    """A small model with buffers, trained on numbers of its own."""

    def __init__(self, optimizer: Optimizer = OPTIMIZERS["fused AdamW"]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        matrices, vectors = ([p for p in self.model.parameters() if (p.ndim > 1) == many] for many in (True, False))
        self.optimizer = optimizer([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}])
        self.done = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            torch.manual_seed(self.done)
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 4)).square().mean().backward()
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 / (self.done + 3)
            self.optimizer.step()
            self.done += 1

    def take(self) -> Snapshot:
        return take(self.done, self.model, self.optimizer)


def snapshot(steps: int) -> Snapshot:
    training = Training()
    training.step(steps)
    return training.take()


def assert_equal(one: Snapshot, other: Snapshot) -> None:
    assert one.step == other.step
    for these, those in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert sorted(these) == sorted(those)
        for name in these:
            assert these[name].dtype == those[name].dtype and torch.equal(these[name], those[name]), name
    assert json.dumps(one.values, sort_keys=True) == json.dumps(other.values, sort_keys=True)


def silent(message: str) -> None:
    raise AssertionError(f"nothing was to be told, but: {message}")


# ---- what is read is what was taken


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_comes_back_bit_by_bit_and_goes_on_alike(kind: str, tmp_path: Path):
    kept, resumed = Training(OPTIMIZERS[kind]), Training(OPTIMIZERS[kind])
    kept.step(5)
    put(read(write(kept.take(), tmp_path, ADDRESS, keep=1)), resumed.model, resumed.optimizer)
    resumed.done = 5
    for steps in (0, 5):
        kept.step(steps)
        resumed.step(steps)
        assert_equal(kept.take(), resumed.take())
    without = [
        [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
        for training in (kept, resumed)
    ]
    assert without[0] == without[1]


def test_shared_weights_come_back(tmp_path: Path):
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    one, other = tied(), tied()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    put(read(write(take(1, one, optimizers[0]), tmp_path, ADDRESS, 1)), other, optimizers[1])
    assert torch.equal(one[1].weight, other[1].weight) and other[1].weight is other[0].weight


def test_snapshot_is_a_copy():
    training = Training()
    training.step(3)
    taken, again = training.take(), training.take()
    training.step(2)
    assert_equal(taken, again)
    assert not torch.equal(taken.model["0.weight"], training.take().model["0.weight"])
    assert taken.values["param_groups"][0]["lr"] != training.optimizer.param_groups[0]["lr"]


def test_same_state_gives_the_same_bytes(tmp_path: Path):
    places = [write(snapshot(2), tmp_path / name, ADDRESS, 1) for name in ("a", "b")]
    assert places[0].name == places[1].name


def test_there_is_no_pickle(tmp_path: Path):
    path = write(snapshot(2), tmp_path, ADDRESS, 1)
    assert {file.name for file in path.iterdir()} == FILES
    for file in path.iterdir():
        content = file.read_bytes()
        assert content[:2] not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), file
        if file.suffix == ".json":
            json.loads(content)
        else:
            length = int.from_bytes(content[:8], "little")
            sizes = [entry["data_offsets"][1] for name, entry in json.loads(content[8 : 8 + length]).items()]
            assert 8 + length + max(sizes) == len(content), f"{file} holds more than tensors"


def test_no_pickle_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a pickle")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, no)
    monkeypatch.setattr(torch, "load", no)
    monkeypatch.setattr(torch, "save", no)
    write(snapshot(2), tmp_path, ADDRESS, 1)
    there = newest(tmp_path, silent)
    assert there
    put(there, Training().model, Training().optimizer)
    assert_equal(there, snapshot(2))


def test_only_the_newest_stay(tmp_path: Path):
    for steps in (1, 2, 3, 4, 5):
        write(snapshot(steps), tmp_path, ADDRESS, keep=2)
    assert [path.name[:9] for path in tmp_path.iterdir() if path.name[0] != "."] == [
        path.name[:9] for path in tmp_path.iterdir()
    ], "something half written is left"
    assert [int(path.name[:9]) for path in found(tmp_path)] == [4, 5]


def test_writing_a_state_again_leaves_it_whole(tmp_path: Path):
    first = write(snapshot(2), tmp_path, ADDRESS, 1)
    assert write(snapshot(2), tmp_path, ADDRESS, 1) == first
    assert_equal(read(first), snapshot(2))
    assert list(tmp_path.iterdir()) == [first]


# ---- a crash at any instant


class Crash(BaseException):
    """Stands for the end of the process: nothing that handles errors may run after it."""


# Every call by which `write` touches the disk: (module, attribute).
OPERATIONS = (
    *((checkpoint, name) for name in ("save_file", "write_json", "sync")),
    *((manifest, name) for name in ("write", "sha256_file")),
    *((Path, name) for name in ("mkdir", "rename", "replace", "write_text")),
    *((os, name) for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open")),
    (shutil, "rmtree"),
)


def watched(monkeypatch: pytest.MonkeyPatch, before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `before` with each disk operation's name and arguments, before and after it happens."""

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            before(name, arguments)
            result = original(*arguments, **options)
            before(f"{name} done", arguments)
            return result

        return wrapped

    for owner, attribute in OPERATIONS:
        name = f"{owner.__name__.rpartition('.')[2]}.{attribute}"
        monkeypatch.setattr(owner, attribute, wrap(name, getattr(owner, attribute)))


def crashing(instant: int, folder: Path) -> int:
    """In a child process: write, and end for good at one instant, with exit code 9; 0: it came through."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            count = iter(range(10**9))

            def before(name: str, arguments: tuple[Any, ...]) -> None:
                if next(count) == instant:
                    os._exit(9)

            with pytest.MonkeyPatch.context() as patch:
                watched(patch, before)
                write(snapshot(2), folder, ADDRESS, keep=1)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_crash_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path):
    torch.set_num_threads(1)
    older, newer = snapshot(1), snapshot(2)
    write(older, tmp_path / "template", ADDRESS, 1)
    kept, instant = [], 0
    while True:
        folder = tmp_path / str(instant)
        shutil.copytree(tmp_path / "template", folder)
        code = crashing(instant, folder)
        there = newest(folder, silent)  # not even a damaged one is left for it to skip
        assert there and there.step in (1, 2), f"instant {instant}"
        assert_equal(there, older if there.step == 1 else newer)
        write(newer, folder, ADDRESS, 1)  # what comes next clears what the crash has left
        assert [path.name[:9] for path in folder.iterdir() if not path.name.startswith("damaged-")] == ["000000002"]
        if code == 0:
            break
        assert code == 9
        kept.append(there.step)
        instant += 1
    assert kept == sorted(kept) and set(kept) == {1, 2}, kept
    assert len(kept) > 60, "hardly an operation was watched"


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = write(snapshot(1), tmp_path, ADDRESS, 1)
    events: list[tuple[str, str]] = []

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "os.fsync":
            events.append(("sync", Path(f"/proc/self/fd/{arguments[0]}").readlink().name))
        if name == "shutil.rmtree" and arguments[0] == old:
            events.append(("drop", old.name))
        if name == "Path.rename done":
            events.append(("named", arguments[1].name))
        if name in ("checkpoint.save_file", "manifest.write", "checkpoint.write_json"):
            events.append(("written", name))

    watched(monkeypatch, before)
    new = write(snapshot(2), tmp_path, ADDRESS, 1)
    named = events.index(("named", new.name))
    synced = {what for kind, what in events[:named] if kind == "sync"}
    aside = ".000000002.part"
    assert synced == {*FILES, aside}, "all files and their folder come before the rename"
    order = [what for kind, what in events[:named] if kind == "sync"]
    assert order[-1] == aside, "the folder after its files"
    last_write = max(i for i, (kind, _) in enumerate(events) if kind == "written")
    first_sync = min(i for i, (kind, _) in enumerate(events) if kind == "sync")
    assert last_write < first_sync, "nothing is written after it was synced"
    dropped = events.index(("drop", old.name))
    assert ("sync", tmp_path.name) in events[named:dropped], "new name synced, old one dropped"


# ---- bit rot


def position_classes(path: Path) -> dict[str, tuple[Path, range]]:
    """Every kind of byte in a checkpoint: the file and the range it lies in."""
    classes = {}
    for name in ("model", "optimizer"):
        file = path / f"{name}.safetensors"
        length = int.from_bytes(file.read_bytes()[:8], "little")
        classes[f"{name}: length"] = file, range(8)
        classes[f"{name}: header"] = file, range(8, 8 + length)
        classes[f"{name}: tensors"] = file, range(8 + length, file.stat().st_size)
    for name in ("state", "manifest"):
        file = path / f"{name}.json"
        classes[name] = file, range(file.stat().st_size)
    return classes


def test_every_changed_byte_is_detected(tmp_path: Path):
    path = write(snapshot(2), tmp_path, ADDRESS, 1)
    read(path)  # the control
    dice = random.Random(0)
    classes = position_classes(path)
    tried = dict.fromkeys(classes, 0)
    for number in range(1000):
        kind = list(classes)[number % len(classes)]
        file, positions = classes[kind]
        content = file.read_bytes()
        place = dice.choice(positions)
        rotten = bytearray(content)
        rotten[place] ^= dice.randrange(1, 256)
        file.write_bytes(rotten)
        with pytest.raises(Damaged):
            read(path)
        file.write_bytes(content)
        tried[kind] += 1
    read(path)  # and all was put back
    assert len(tried) == 8 and min(tried.values()) >= 100


def truncated(path: Path) -> None:
    os.truncate(path / "optimizer.safetensors", (path / "optimizer.safetensors").stat().st_size - 1)


def grown(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def emptied(path: Path) -> None:
    os.truncate(path / "manifest.json", 0)


def renamed(path: Path) -> None:
    path.rename(path.with_name("000000003" + path.name[9:]))


def swapped(path: Path) -> None:
    """Another run's weights, and a manifest that fits them: only the folder's name can tell."""
    other = write(snapshot(3), path.parent / "other", ADDRESS, 1)
    shutil.copytree(other, path, dirs_exist_ok=True)
    shutil.rmtree(path.parent / "other")


def rotten(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


DAMAGES = [truncated, grown, emptied, renamed, swapped, rotten] + [
    lambda path, name=name: (path / name).unlink() for name in sorted(FILES)
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damaged_checkpoint_is_told_set_aside_and_skipped(damage: Callable[[Path], None], tmp_path: Path):
    older = write(snapshot(1), tmp_path, ADDRESS, 3)
    damage(write(snapshot(2), tmp_path, ADDRESS, 3))
    damaged = found(tmp_path)[-1].name
    told: list[str] = []
    there = newest(tmp_path, told.append)
    assert there
    assert_equal(there, snapshot(1))
    assert len(told) == 1 and damaged in told[0] and "\n" not in told[0]
    assert (tmp_path / f"damaged-{damaged}").is_dir() and found(tmp_path) == [older]
    there = newest(tmp_path, silent)
    assert there and there.step == 1


def test_same_checkpoint_may_be_damaged_twice(tmp_path: Path):
    for _ in range(2):
        rotten(write(snapshot(2), tmp_path, ADDRESS, 3))
        assert newest(tmp_path, lambda message: None) is None


def test_nothing_is_half_loaded(tmp_path: Path):
    """Weights that are whole beside an optimizer that is not: neither is taken."""
    path = write(snapshot(2), tmp_path, ADDRESS, 1)
    truncated(path)
    with pytest.raises(Damaged, match="optimizer"):
        read(path)


# ---- a full disk

SMALL = 1 << 20  # bytes that the disk holds; a checkpoint of `Large` needs more than half of it


class Large(Training):
    """So large that only one of its checkpoints fits."""

    def __init__(self) -> None:
        self.model = nn.Linear(400, 400)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.done = 1


def on_a_full_disk(folder: Path, on_error: str) -> dict[str, Any]:
    """Save twice, where the second one does not fit; what happened."""
    training, told, failure = Large(), [], ""
    saver = Saver(folder, ADDRESS, 3, on_error, told.append)
    saver.save(1, training.model, training.optimizer)
    saver.wait()
    if os.environ["DISK"] == "limit":  # no file may grow beyond half of one
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 4, resource.RLIM_INFINITY))
    try:
        saver.save(2, training.model, training.optimizer)
        saver.wait()
    except Failure as error:
        failure = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    there = newest(folder, silent)
    rest = [path.name for path in folder.iterdir() if path not in found(folder)]
    shutil.rmtree(folder)
    return {"failure": failure, "told": told, "step": there and there.step, "rest": rest}


# In a process of its own, because its disk is full: prints what happened, stopping and continuing.
WRITER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import conftest
from test_checkpoint import on_a_full_disk
print(json.dumps({how: on_a_full_disk(Path(sys.argv[1]), how) for how in ("stop", "continue")}))
"""
SMALL_DISK = f'mount -t tmpfs -o size={SMALL} none "$0" && exec "$@"'  # in a mount namespace of its own
NAMESPACE = "unshare", "--map-root-user", "--mount"


def mountable() -> bool:
    """Whether this user may mount a disk."""
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("disk", ["tmpfs", "limit"] if mountable() else ["limit"])
def test_full_disk_is_told_and_costs_no_older_checkpoint(disk: str, tmp_path: Path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "checkpoints"), str(Path(__file__).parent)]
    if disk == "tmpfs":
        command = [*NAMESPACE, "sh", "-c", SMALL_DISK, str(tmp_path), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DISK": disk})
    assert done.returncode == 0, done.stderr
    for on_error, seen in json.loads(done.stdout).items():
        assert seen["step"] == 1 and seen["rest"] == []
        (message,) = seen["told"] if on_error == "continue" else [seen["failure"]]
        assert message.startswith("no checkpoint was written: ")
        assert message.endswith("; the previous one is whole")
        reason = {"tmpfs": errno.ENOSPC, "limit": errno.EFBIG}[disk]
        assert os.strerror(reason) in message and "\n" not in message
        assert bool(seen["failure"]) == (on_error == "stop")


# ---- in the background


class Gate:
    """A stand-in for `write` that waits to be let through."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.open = threading.Semaphore(0)

    def __call__(self, snapshot: Snapshot, *rest: Any) -> Path:
        self.entered.append(snapshot.step)
        assert self.open.acquire(timeout=30)
        return Path()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(checkpoint, "write", gate)
    yield gate
    gate.open.release(100)


def test_saving_waits_for_nothing_but_the_copy_and_the_save_before(gate: Gate, tmp_path: Path):
    training = Training()
    training.step(1)
    saver = Saver(tmp_path, ADDRESS, 1, "stop", silent)
    saver.save(1, training.model, training.optimizer)  # returns, although nothing gets written
    training.step(1)
    second = threading.Thread(target=saver.save, args=(2, training.model, training.optimizer))
    second.start()
    second.join(0.2)
    assert second.is_alive() and gate.entered == [1], "two snapshots at once"
    gate.open.release()
    second.join(30)
    assert not second.is_alive(), "it waits for its own write"
    gate.open.release()
    saver.wait()
    assert gate.entered == [1, 2]


def test_what_is_saved_is_the_state_when_save_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    training, free = Training(), threading.Event()
    training.step(2)
    original = checkpoint.write

    def later(*arguments: Any) -> Path:
        assert free.wait(30)
        return original(*arguments)

    monkeypatch.setattr(checkpoint, "write", later)
    saver = Saver(tmp_path, ADDRESS, 1, "stop", silent)
    saver.save(2, training.model, training.optimizer)
    training.step(3)
    free.set()
    saver.wait()
    there = newest(tmp_path, silent)
    assert there
    assert_equal(there, snapshot(2))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("odd")])
@pytest.mark.parametrize("ask", ["wait", "check", "save"])
def test_error_in_the_background_surfaces_once_when_asked(
    error: Exception, ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: Any) -> Path:
        raise error

    monkeypatch.setattr(checkpoint, "write", fail)
    training, told = Training(), []
    for on_error in ("stop", "continue"):
        saver = Saver(tmp_path, ADDRESS, 1, on_error, told.append)
        saver.save(1, training.model, training.optimizer)
        assert saver._thread
        saver._thread.join()
        arguments = (2, training.model, training.optimizer) if ask == "save" else ()
        if on_error == "stop":
            with pytest.raises(Failure, match="no checkpoint was written"):
                getattr(saver, ask)(*arguments)
            assert told == []
        else:
            getattr(saver, ask)(*arguments)
            assert len(told) == 1 and str(error) in told[0]
        if ask != "save":
            saver.wait()
            assert len(told) == (on_error == "continue"), "told twice"
