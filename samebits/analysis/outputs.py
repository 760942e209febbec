"""The outputs of DVC's stages, compared with the digests in dvc.lock, and dvc.lock with the one that git holds."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.forms import ABSENT, Form
from ..base.git import GitFailed, git, is_repository
from ..base.project import Project
from ..base.text import some
from ..config.yaml_file import parse_yaml, read_yaml
from ..record.names import WEIGHTS

OUTPUTS = "dvc.lock"
FOLDER = ".dir"  # how DVC ends the MD5 of a folder

Stages = Mapping[str, Any]


class Entry(Form):
    """A file or a folder, and its digest."""

    path: str
    md5: str = ABSENT
    hash: str = ABSENT


class Locked(Form):
    """A stage."""

    deps: list[Entry] = ABSENT
    outs: list[Entry] = ABSENT


class Lock(Form):
    """What dvc.lock holds."""

    stages: dict[str, Locked]


def stages(project: Project) -> Stages:
    """The stages of dvc.lock, by name.

    Raises:
        UserError: it is missing, or has another shape.
    """
    return dict(read_yaml(project.root / OUTPUTS, Lock, f"Restore it with: git checkout {OUTPUTS}")["stages"])


def made_by_dvc(project: Project, locked: Stages, out: Path) -> bool:
    """Whether the weights in a run directory are an output of a stage."""
    return (out / WEIGHTS).resolve() in {(project.root / entry["path"]).resolve() for _, entry in _outs(locked)}


def left_over(project: Project, locked: Stages) -> list[str]:
    """The outputs that are as dvc.lock says, though an output of another stage that they were made from is not."""
    outs = {entry["path"]: entry for _, entry in _outs(locked)}
    others = {name for name, entry in outs.items() if _is_as_locked(project, entry) is False}
    after = {name for name, stage in locked.items() for dep in stage.get("deps", ()) if dep["path"] in others}
    return [entry["path"] for name, entry in _outs(locked) if name in after and _is_as_locked(project, entry)]


def committed(project: Project, locked: Stages) -> tuple[bool, str]:
    """Whether all outputs are those of the dvc.lock that git holds, and a sentence on that; each byte is read.

    DVC rewrites dvc.lock without a message when outputs differ, and knows nothing of runs that it did not start.
    """
    try:
        shown = git(project.root, "show", f"HEAD:./{OUTPUTS}").decode()
    except GitFailed:
        if not is_repository(project.root):
            return True, f"no git here, so there is no committed {OUTPUTS} to compare with: run it in a clone"
        return False, f"{OUTPUTS}: not committed, so there is nothing to compare with: git add and commit it"
    there = parse_yaml(shown, f"{OUTPUTS} as committed", Lock, "Write and commit another: dvc repro")
    if there["stages"] != locked:
        return False, (
            f"the outputs are not those of the committed {OUTPUTS}: commit it if you meant that, "
            f"else look at: git diff {OUTPUTS}"
        )
    found = {entry["path"]: _is_as_locked(project, entry) for _, entry in _outs(locked)}
    if others := [name for name, same in found.items() if same is False]:
        return False, (
            f"the outputs are not those of the committed {OUTPUTS}: {some(others)}: missing, altered, or made without "
            f"DVC. Make them with DVC: make repro"
        )
    unknown = [name for name, same in found.items() if same is None]
    but = f", but for {some(unknown)}, of which it has no MD5 to compare" if unknown else ""
    return True, f"the outputs are those of the committed {OUTPUTS}{but}"


def _outs(locked: Stages) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each output, with the name of its stage."""
    for name, stage in locked.items():
        for entry in stage.get("outs", ()):
            yield name, entry


def _is_as_locked(project: Project, entry: Mapping[str, str]) -> bool | None:
    """Whether a file or folder has the MD5 that dvc.lock states, as DVC computes it; None where it states none."""
    if entry.get("hash") != "md5" or "md5" not in entry:
        return None
    path = project.root / entry["path"]
    if not entry["md5"].endswith(FOLDER):
        return path.is_file() and _md5(path) == entry["md5"]
    names = (Path(at, name).relative_to(path).as_posix() for at, _, files in os.walk(path) for name in files)
    listed = [{"md5": _md5(path / name), "relpath": name} for name in sorted(names)]
    return hashlib.md5(json.dumps(listed, sort_keys=True).encode()).hexdigest() + FOLDER == entry["md5"]


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
