"""A file is written durably: a reader sees the old one or the new one, whatever happens to the writer."""

import os
from pathlib import Path

import pytest

from samebits.base.files import durable, write_json


def test_file_has_its_name_once_it_is_written(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with durable(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_failed_write_leaves_the_old_file_and_nothing_else(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    write_json(path, 1)

    def full(descriptor: int) -> None:
        raise OSError("no space")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((OSError, TypeError)):
        write_json(path, 2 if step == "fsync" else object())
    assert path.read_text() == "1\n" and [*tmp_path.iterdir()] == [path]


def test_two_who_write_at_once_have_places_of_their_own(tmp_path: Path):
    path = tmp_path / "a"
    with durable(path, ".1") as one, durable(path, ".2") as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one" and [*tmp_path.iterdir()] == [path]
