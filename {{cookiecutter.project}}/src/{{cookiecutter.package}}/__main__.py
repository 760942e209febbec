"""The `repro` command of this project; `python -m <package>` is the same."""

from . import PROJECT
from .config import Config
from .repro.cli import Ours, main


def repro() -> None:
    """Hand the library this project and its config."""
    main(obj=Ours(PROJECT, Config))


if __name__ == "__main__":
    repro()
