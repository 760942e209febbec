"""Bit rot: a checkpoint is what was written, or it is refused as a whole."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from states import FILES, ORIGIN, assert_equal, silent, snapshot

from samebits.checkpoint.checkpoint import Damaged, found, newest, read, write


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
    path = write(snapshot(2), tmp_path, ORIGIN, 1)
    read(path, ORIGIN)  # the control
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
            read(path, ORIGIN)
        file.write_bytes(content)
        tried[kind] += 1
    read(path, ORIGIN)  # and all was put back
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
    other = write(snapshot(3), path.parent / "other", ORIGIN, 1)
    shutil.copytree(other, path, dirs_exist_ok=True)
    shutil.rmtree(path.parent / "other")


def rotten(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGES = [truncated, grown, emptied, renamed, swapped, rotten] + [
    lambda path, name=name: (path / name).unlink() for name in sorted(FILES)
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damaged_checkpoint_is_told_set_aside_and_skipped(damage: Callable[[Path], None], tmp_path: Path):
    older = write(snapshot(1), tmp_path, ORIGIN, 3)
    damage(write(snapshot(2), tmp_path, ORIGIN, 3))
    damaged = found(tmp_path)[-1].name
    text: list[str] = []
    there = newest(tmp_path, ORIGIN, text.append)
    assert there
    assert_equal(there, snapshot(1))
    assert len(text) == 1 and damaged in text[0] and "\n" not in text[0]
    assert (tmp_path / f"damaged-{damaged}").is_dir() and found(tmp_path) == [older]
    there = newest(tmp_path, ORIGIN, silent)
    assert there and there.step == 1


def test_same_checkpoint_may_be_damaged_twice(tmp_path: Path):
    for _ in range(2):
        rotten(write(snapshot(2), tmp_path, ORIGIN, 3))
        assert newest(tmp_path, ORIGIN, lambda message: None) is None
