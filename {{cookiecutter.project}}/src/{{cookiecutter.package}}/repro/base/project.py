"""The folders of a project. They are passed in, so that the machinery serves any project."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Project:
    """The places of a project, all derived from one.

    Attributes:
        package: the folder of its package, such as ~/tides/src/tides.
    """

    package: Path

    @property
    def root(self) -> Path:
        """The folder that holds params.yaml, and in which commands run."""
        return self.package.parents[1]

    @property
    def name(self) -> str:
        """The name by which Python imports the package."""
        return self.package.name

    @property
    def machinery(self) -> Path:
        """The folder of this machinery in the package."""
        return self.package / "repro"
