"""The content address: one hash over what was asked for. Its preimage names the fields in which two differ.

Of the code, it states each file of the user's package, and the arithmetic of the library's core (`core.arithmetic`). It
stays the same if other modules of the library change, such as those that write records.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rfc8785

from ..base.files import read_text
from ..base.project import NAME, Project
from ..base.text import Difference, differences, flatten
from ..config.settings import Settings
from ..core import arithmetic
from ..core.errors import UserError
from . import manifest
from .locks import LOCKS
from .pins import TRAIN, pins

FOLDER = f"{NAME}/"  # with it the names of the library's files begin, those of the owner's lie in the package
CORE = "core/"  # in the library; its files are named from there, so that a move changes nothing
LIST = "library.sha256"  # of the digests of the library's files, as released
# Of the library: no run imports these; a stage that has loaded one is refused.
OUTSIDE_THE_RUN = ("analysis/", "cli.py", "docs/", LIST, arithmetic.RELEASES)
# Files that editors and Python leave behind.
LEFT_BEHIND = re.compile(r"(^|/)(\.|__pycache__/)|~$")


@dataclass(frozen=True)
class ContentAddress:
    """One hash over what was requested.

    Attributes:
        preimage: the ingredients, JSON-compatible; the address is the SHA-256 of its canonical JSON.
        code: SHA-256 (hex) of each file of the package and of core, by its path relative to the package, or from
            samebits/.
    """

    preimage: dict[str, Any]
    code: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def digest(self) -> str:
        return digest(self.preimage)

    @property
    def parts(self) -> dict[str, str]:
        return {name: digest(value) for name, value in self.preimage.items()}

    def record(self) -> dict[str, Any]:
        """Return the content of address.json: `core_files` are the files behind the arithmetic that is stated."""
        files = {} if arithmetic.is_edited(self.preimage["core"]) else {"core_files": core_files(self.code)}
        return {"address": self.digest, "parts": self.parts, "preimage": self.preimage, **files}


def fields(preimage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preimage as `part.field`: each data file by its path, and core as one field."""
    data = {entry["path"]: entry["sha256"] for entry in preimage["data"]["files"]}
    core = {"core": arithmetic.description(preimage["core"])} if preimage.get("core") else {}
    return flatten({**preimage, "data": data, **core})


def address_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return the fields in which two content addresses differ, as address.json or a receipt records them.

    If one of two cores is edited, the files in which they differ are fields, too.
    """
    preimages = one["preimage"], other["preimage"]
    differing = differences(*map(fields, preimages)) or differences(*preimages)
    cores = [preimage.get("core", {}) for preimage in preimages]
    if len({*map(arithmetic.is_earlier, cores)}) > 1:
        # Earlier releases had one more key, whose usual value is today's only way to add gradients.
        ignored = Difference("config.parallel.reduce", "tree", None), Difference("config.parallel.reduce", None, "tree")
        return [difference for difference in differing if difference not in ignored]
    if cores[0] == cores[1] or not any(map(arithmetic.is_edited, cores)):
        return differing
    files = [{"core": record.get("core_files", core)} for record, core in zip((one, other), cores, strict=True)]
    # The files are equal if the project has lost its list of releases, and a released core counts as edited.
    in_core = differences(*files) or [difference for difference in differing if difference.field == "core"]
    return [*in_core, *(difference for difference in differing if difference.field != "core")]


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON (RFC 8785) of a JSON-compatible value.

    Raises:
        UserError: a number that JSON cannot hold exactly, such as an integer beyond 2**53.
    """
    try:
        return hashlib.sha256(rfc8785.dumps(value)).hexdigest()
    except rfc8785.CanonicalizationError as error:
        raise UserError(f"canonical JSON cannot hold a value exactly: {error}") from None


def code(project: Project) -> dict[str, str]:
    """SHA-256 of every file that enters the address, by its name."""
    return {name: manifest.sha256_file(project.file(name)) for name in addressed(project)}


def addressed(project: Project) -> list[str]:
    """The files that enter the address, by their names: the owner's package, and the library's core."""
    return [name for name in project_files(project) if not name.startswith(FOLDER) or in_core(name)]


def project_files(project: Project) -> list[str]:
    """The files of the owner's package by their paths relative to it, and those of the library, from samebits/.

    Raises:
        UserError: as `files`; the package or the project's copy of the library lies elsewhere; or the package has a
            folder samebits.
    """
    for folder in (project.package, project.library):
        if folder.is_relative_to(project.root):
            inside = project.root.resolve() / folder.relative_to(project.root)
            if folder.resolve() != inside:
                raise UserError(f"{inside}: a link to a folder, whose changes DVC would not see. Copy it here")
    own = files(project.package)
    if clash := [name for name in own if name.startswith(FOLDER)]:
        raise UserError(f"{project.package / clash[0]}: {FOLDER} is the library's name. Call the folder otherwise")
    return sorted([*own, *(f"{FOLDER}{name}" for name in files(project.library))])


def core_stated(project: Project, code: Mapping[str, str]) -> dict[str, Any]:
    """Return what the content address states of the core of the project's library; `code` is as `code` returns it."""
    return arithmetic.stated(core_files(code), arithmetic.releases(project.library))


def in_core(name: str) -> bool:
    """Whether a file of the library, named from samebits/ or from inside it, is of its core."""
    return name.removeprefix(FOLDER).startswith(CORE)


def is_read(name: str) -> bool:
    """Whether a run may read a file of this name: all but those of the library that no run imports."""
    return not name.startswith(FOLDER) or not name.removeprefix(FOLDER).startswith(OUTSIDE_THE_RUN)


def core_files(code: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of core's files by path relative to core; `code` names them from samebits/."""
    return {name.removeprefix(FOLDER + CORE): sha256 for name, sha256 in code.items() if name.startswith(FOLDER + CORE)}


def files(folder: Path) -> list[str]:
    """The files below `folder` by their names, sorted, without those that editors and Python leave behind.

    Raises:
        UserError: a folder in it is a link: Python imports from there, but DVC does not look inside.
    """
    found, folders = [], [""] if folder.is_dir() else []
    while folders:
        inside = folders.pop()
        with os.scandir(f"{folder}/{inside}") as listed:
            for each in listed:
                name = f"{inside}{each.name}"
                at = Path(each) if each.is_symlink() else each  # a link may lead in a circle
                if at.is_file() and not LEFT_BEHIND.search(name):
                    found.append(name)
                elif at.is_dir() and not LEFT_BEHIND.search(f"{name}/"):
                    if each.is_symlink():
                        raise UserError(
                            f"{each.path}: a link to a folder, whose changes DVC would not see. Copy it here"
                        )
                    folders.append(f"{name}/")
    return sorted(found)


def locks(project: Project) -> dict[str, str]:
    """SHA-256 of the requirements in each lock of what a training loads, by file name."""
    paths = [path for name in TRAIN if (path := project.root / LOCKS / name).is_file()]
    return {path.name: requirements(read_text(path, "Restore it from git, or: make lock")) for path in paths}


def requirements(lock: str) -> str:
    """SHA-256 of the requirements in a lock's text; comments carry names and change nothing."""
    lines = (line.split(" #")[0].strip() for line in lock.splitlines())
    pins = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(pins.encode()).hexdigest()


def content_address(project: Project, config: Settings, data: dict[str, Any]) -> ContentAddress:
    """Return the address of what `config` requests in `project`; `data` is the manifest of the prepared data."""
    digests = code(project)
    sources = {name: project.file(name).read_bytes() for name in digests if name.endswith(".py")}
    preimage = {
        "config": config.addressed(),
        "code": {name: sha256 for name, sha256 in digests.items() if not name.startswith(FOLDER)},
        "core": core_stated(project, digests),
        "data": data,
        "lock": pins(project.root, sources, config.unhashed.modules),
        "seed": config.seed,
    }
    if config.start.addressed:
        preimage["start"] = config.start.addressed
    return ContentAddress(preimage, digests)
