"""What the tests share: the project, with the environment of a run; the config, with data prepared; and one process.

The tests are yours. Of your model and your data they ask for the few names that `samebits docs your-model` lists.
"""

from pathlib import Path
from typing import Any

import pytest

import samebits as sb
from samebits.testing import Tested

ROOT = Path(__file__).parents[1]
tested = Tested(ROOT)


def pytest_configure() -> None:
    """Set the environment of a run before torch loads. What is wrong with it is said once, before any test."""
    try:
        tested.begin()
    except sb.UserError as refused:
        pytest.exit(str(refused), returncode=2)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The config, and the data that it asks for, prepared in a folder of the tests' own."""
    return tested.prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def world(config: Any) -> Any:
    """One process, with its device, and with the flags of a run set."""
    return tested.world(config)
