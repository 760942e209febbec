"""The project in another folder, as it was when the run began: there its code trains a part of the run again.

What that code writes beside its run directory goes there, too, and not over the files of the run that has just ended.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..address import hashing, loaded
from ..address.address import project_files
from ..address.locks import LOCKS
from ..base.project import SETTINGS, Project
from ..config.params import PARAMS
from ..config.settings import Settings
from ..guards.stages import STAGES


def copied(project: Project, config: Settings, changed: Mapping[str, Any], folder: Path) -> Project:
    """Write the project into a new folder; its params.yaml holds `config` with `changed` keys.

    The code is that which the run has loaded. Data, and files that no hash covers, are links to those of the project;
    what else lies there is left out.
    """
    root, there = project.root.absolute(), folder.absolute()
    copy = Project(there / "src" / project.name)
    for name in project_files(project):
        path = copy.package / name if project.file(name).is_relative_to(project.package) else None
        if path is None and project.has_library:
            path = there / project.library.relative_to(project.root) / project.file(name).relative_to(project.library)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            loaded.copy(project, name, path)
    for each in root.iterdir():
        if each.is_dir() and each.name[0] != ".":
            (there / each.name).mkdir(exist_ok=True)  # code that writes there expects it
        elif each.name in (SETTINGS, STAGES):
            shutil.copyfile(each, there / each.name)
    shutil.copytree(root / LOCKS, there / LOCKS, dirs_exist_ok=True)
    keys = config.model_dump(mode="json")
    for section, key in (("data", "raw"), ("data", "prepared"), ("start", "run")):
        keys[section][key] = str(root / keys[section][key]) if keys[section][key] else ""
    for name, value in changed.items():
        section, _, key = name.partition(".")
        keys[section][key] = value
    (there / PARAMS).write_text(json.dumps(keys, indent=2))  # which YAML reads
    for name in (config.data.raw, config.data.prepared, str(hashing.MEMORY), *config.unhashed.files):
        _link(root, there, name)
    return copy


def _link(root: Path, there: Path, name: str) -> None:
    """Let a name in the copy lead to the project's file or folder; one outside the project is the same for both."""
    path, copy = root / name, there / name
    if path.exists() and not copy.exists() and Path(os.path.normpath(copy)).is_relative_to(there):
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(path)
