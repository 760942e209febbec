"""A checklist over code, packages, data, environment, random numbers, hardware and services, before a run or in CI.

A check is one row of `CHECKS`: a function of the project and its config that returns what it saw. A refusal of the
library is a fault: its line already names the thing, the value wanted and the next step. Nothing is changed.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...base.project import Project
from ...base.shape import plain
from ...config.settings import Settings
from ...core.errors import RunError, of_system
from . import checks, hardware, leftovers, packages
from .found import FAULT, WARNING, Context, Found


@dataclass(frozen=True)
class Check:
    """One row of the checklist: where it belongs, its name, and how to look."""

    area: str
    name: str
    look: Callable[[Context], Found]


CHECKS = (
    Check("code", "git", checks.git),
    Check("code", "library", checks.library_as_released),
    Check("code", "address", checks.code_of_the_address),
    Check("packages", "locks", checks.locks),
    Check("packages", "installed", packages.installed),
    Check("packages", "files", packages.package_files),
    Check("data", "dataset", checks.dataset),
    Check("data", "prepared", checks.prepared),
    Check("leftovers", "results", leftovers.expected),
    Check("leftovers", "plots", leftovers.plots),
    Check("leftovers", "keys", leftovers.keys),
    Check("leftovers", "dataset", leftovers.raw_files),
    Check("leftovers", "artifacts", leftovers.artifacts),
    Check("environment", "flags", checks.flags_effective),
    Check("environment", "arithmetic", checks.arithmetic),
    Check("environment", "image", checks.image),
    Check("random", "generators", checks.generators),
    Check("hardware", "GPU", hardware.gpu),
    Check("hardware", "memory", hardware.memory),
    Check("hardware", "disk", hardware.disk),
    Check("hardware", "clock", hardware.clock),
    Check("services", "MLflow", checks.mlflow),
    Check("services", "signing", checks.signing),
)


@dataclass(frozen=True)
class Row:
    """What one check saw."""

    area: str
    name: str
    found: Found

    def lines(self) -> list[str]:
        """In words: what was seen, and the fix where there is one."""
        head = f"{self.found.state:8} {self.area:11} {self.name:10} "
        said = [" ".join(text.split()) for text in (self.found.seen, self.found.fix)]
        return [plain(line) for line in (head + said[0], " " * len(head) + said[1]) if line.strip()]

    def stated(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"area": self.area, "name": self.name, **asdict(self.found)}


def examine(project: Project, settings: Settings) -> Iterator[Row]:
    """Walk the checklist; each row as soon as it is known."""
    context = Context(project, settings)
    for check in CHECKS:
        yield Row(check.area, check.name, seen(check, context))


def seen(check: Check, context: Context) -> Found:
    """What one check finds; a refusal, or what cannot be read or loaded, is a fault."""
    try:
        return check.look(context)
    except RunError as failure:
        return Found(FAULT, str(failure))
    except OSError as error:
        return Found(FAULT, str(of_system(error) or error))
    except ImportError as error:
        return Found(FAULT, f"a package cannot be loaded: {error}", "make setup installs what the locks say")


def summary(rows: list[Row]) -> tuple[bool, str]:
    """Whether no check found a fault, and one sentence on all rows."""
    faults, warnings = (sum(row.found.state is state for row in rows) for state in (FAULT, WARNING))
    if faults:
        return False, f"{faults} of {len(rows)} checks found a fault: a run here may fail, or not be repeated"
    return True, f"{len(rows)} checks, no fault" + (f"; {warnings} to know of" if warnings else "")
