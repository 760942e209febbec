"""Unit tests start no process: what would start one, or fork, ends the test."""

import os
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest

# What starts a process; all other functions of the standard library call one of these.
STARTS = {
    subprocess: ("Popen",),
    os: ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system"),
    BaseProcess: ("start",),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Also while fixtures of the session are made. pytest calls this for the tests of all folders."""
    if Path(__file__).parent not in item.path.parents:
        return (yield)

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError(f"a unit test starts a process: {arguments}. Move it to another folder")

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in STARTS.items():
            for name in names:
                patch.setattr(owner, name, refuse)
        return (yield)
