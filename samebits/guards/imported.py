"""An import in the owner's package that fails: where it stands, what is missing and the next step, in a line."""

import os
from traceback import extract_tb

from ..base.project import NAME, Project
from ..core.errors import UserError

IMPORTLIB = "<frozen importlib", f"importlib{os.sep}__init__.py"


def failed(project: Project, error: ImportError) -> UserError | None:
    """What to tell of it; None where another package fails within, which needs its traceback."""
    frames = [
        frame for frame in extract_tb(error.__traceback__) if not any(part in frame.filename for part in IMPORTLIB)
    ]
    places = [place for place, frame in enumerate(frames) if frame.filename.startswith(f"{project.package}{os.sep}")]
    if not places:
        return None
    frame, within = frames[places[-1]], frames[places[-1] + 1 :]
    where = f"{os.path.relpath(frame.filename, project.root)}:{frame.lineno}"
    said = error.msg.removesuffix(f" ({error.path})")
    top = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and top not in ("", NAME, project.name):
        return UserError(
            f"{where}: {said}. If pyproject.toml names its package: make setup. Else add it there, then make lock and "
            "make setup (samebits docs locks)"
        )
    if within:
        return None
    if top == NAME:
        return UserError(
            f"{where}: {said}. The library's names come from {NAME} alone; for an older layout: samebits docs upgrade"
        )
    return UserError(f"{where}: {said}. Mend that line, or restore what it names")
