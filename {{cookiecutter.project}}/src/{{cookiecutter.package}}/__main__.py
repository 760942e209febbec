"""The `repro` command of this project; `python -m <package>` is the same."""

from samebits.cli import Ours, main

from . import PROJECT
from .config import Config


def repro() -> None:
    """Hand the library this project and its config."""
    main(obj=Ours(PROJECT, Config))


if __name__ == "__main__":
    repro()
