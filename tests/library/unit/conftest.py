"""Unit tests start no process: what would start one, or fork, ends the test."""

import os
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import NoReturn

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Also while fixtures of the session are made."""

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError(f"a unit test starts a process: {arguments}. Move it to another folder")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((subprocess, "Popen"), (os, "fork"), (BaseProcess, "start")):
            patch.setattr(owner, name, refuse)
        return (yield)
