"""The planted faults of this folder's conftest.py: each way to start a process ends a unit test."""

import os
import pty
import subprocess
from collections.abc import Callable
from multiprocessing import get_context

import pytest

WAYS: dict[str, Callable[[], object]] = {
    "a command": lambda: subprocess.run(["true"]),
    "a command of a shell": lambda: os.system("true"),
    "a command that is read": lambda: os.popen("true"),
    "a command that is spawned": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "one that is looked for": lambda: os.posix_spawnp("true", ["true"], {}),
    "one that os waits for": lambda: os.spawnvp(os.P_WAIT, "true", ["true"]),
    "a fork": lambda: os.fork(),
    "a fork with a terminal": lambda: pty.fork(),
    "a process forked": lambda: get_context("fork").Process(target=print).start(),
    "a process of a server": lambda: get_context("forkserver").Process(target=print).start(),
}


@pytest.mark.parametrize("way", WAYS)
def test_process_ends_a_unit_test(way: str):
    with pytest.raises(AssertionError, match="a unit test starts a process"):
        WAYS[way]()
