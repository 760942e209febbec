"""Where things lie: the folder of this library, and those of a project. No other module knows where it lies itself."""

from dataclasses import dataclass
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1]  # the folder of this library; it has the same name in each project


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
    def library(self) -> Path:
        """The folder of the library in the package."""
        return self.package / LIBRARY.name


_begun: list[Project] = []  # at most one


def work_for(project: Project) -> None:
    """Have this process work for a project from now on."""
    _begun[:] = [project]


def root() -> Path:
    """The root of the project that this process works for; the current folder, as params.yaml, where it has no such."""
    return _begun[0].root if _begun else Path.cwd()
