"""The `repro` command of this project; `python -m <package>` is the same."""

from .config import Config
from .repro.cli import main


def repro() -> None:
    """Hand the machinery the config that this project has."""
    main(obj=Config)


if __name__ == "__main__":
    repro()
