"""What the checks of `samebits doctor` look at, and what they return."""

import enum
from dataclasses import dataclass

from ...base.project import Project
from ...config.settings import Settings


class State(enum.StrEnum):
    """The outcome of a check; UNKNOWN where this machine does not tell."""

    OK, WARNING, FAULT, UNKNOWN = "ok", "warning", "FAULT", "unknown"


OK, WARNING, FAULT, UNKNOWN = State


@dataclass(frozen=True)
class Found:
    """What a check saw, and the next step where there is one."""

    state: State
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Context:
    """What the checks look at."""

    project: Project
    settings: Settings
