"""Where things lie: the folder of this library, and those of a project. No other module knows where it lies itself."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import UserError

LIBRARY = Path(__file__).resolve().parents[1]  # the folder of the library that runs
NAME = "samebits"
VENDORED = Path("vendor", NAME)  # a project's own copy of the library, from the project's root
SETTINGS = "pyproject.toml"
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Project:
    """The places of a project, all derived from one.

    Attributes:
        package: the folder of its package, such as ~/tides/src/tides.
    """

    package: Path

    @classmethod
    def at(cls, root: Path) -> "Project":
        """The project in a folder: its pyproject.toml names the package.

        Raises:
            UserError: it does not.
        """
        return cls(root / "src" / str(_stated(root, "package")))

    @property
    def root(self) -> Path:
        """The folder that holds params.yaml, and in which commands run."""
        return self.package.parents[1]

    @property
    def name(self) -> str:
        """The name by which Python imports the package."""
        return self.package.name

    @property
    def has_library(self) -> bool:
        """Whether it has a copy of the library; else it takes that of its environment, as one of its packages."""
        return (self.root / VENDORED).is_dir()

    @property
    def library(self) -> Path:
        """The folder of its copy of the library; where it has none, of the library that runs."""
        return self.root / VENDORED if self.has_library else LIBRARY

    @property
    def path(self) -> list[str]:
        """The folders in which Python finds its package and its copy of the library."""
        return [str(self.package.parent), str(self.root / VENDORED.parent)]

    @property
    def template(self) -> str:
        """The version of the template that wrote the project; where the library is a package, the library's."""
        if not self.has_library:
            return version_of(LIBRARY)
        try:
            return str(_stated(self.root, "template"))
        except UserError:
            return "unknown"

    def file(self, name: str) -> Path:
        """Where a file lies that is named as the content address names it."""
        inside = name.removeprefix(f"{NAME}/")
        return self.package / name if inside == name else self.library / inside

    def shown(self, name: str) -> str:
        """That file from the project's root; one of a library that is installed by its whole path."""
        path = self.file(name)
        return (path.relative_to(self.root) if path.is_relative_to(self.root) else path).as_posix()


def version_of(library: Path) -> str:
    """The version that the library in a folder states."""
    found = VERSION.search((library / "__init__.py").read_text("utf-8"))
    return found[1] if found else "unknown"


def _stated(root: Path, key: str) -> object:
    """What a project's pyproject.toml says to the library.

    Raises:
        UserError: nothing, or it cannot be read.
    """
    path = root / SETTINGS
    try:
        return tomllib.loads(path.read_text())["tool"][NAME][key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f'{path}: no {key} in [tool.{NAME}] seen, {key} = "…" wanted. Restore it from git, or go to a project'
        ) from None


_begun: list[Project] = []  # at most one


def work_for(project: Project) -> None:
    """Have this process work for a project from now on."""
    _begun[:] = [project]


def root() -> Path:
    """The root of the project that this process works for; the current folder, as params.yaml, where it has no such."""
    return _begun[0].root if _begun else Path.cwd()
