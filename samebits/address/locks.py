"""Modules that are not the project's come from Python, or from the packages that its locks name."""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..base.project import Project
from ..base.text import some
from ..core.errors import UserError

LOCKS = "requirements"  # the folder of the locks
INSTALLED = {"site-packages", "dist-packages"}  # names of folders
DEVICES = {"cpu": ("torch-cpu.txt", "train-cpu.txt"), "cuda": ("train-cuda.txt",)}  # the locks of what a training loads
# Those of one environment, as requirements/venv.sh has them: also of what a run needs around it.
LOCK_SETS = tuple((*names, "run.txt") for names in DEVICES.values())
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
# Modules by which tools lead Python to an environment or a project: they hold no arithmetic.
PATHFINDERS = re.compile(r"__editable__|_virtualenv$")


def require_installed(project: Project, unhashed: Sequence[str]) -> None:
    """Refuse modules that are neither the project's, nor Python's, nor of a package that its locks name.

    A module without a file of its own there passes where its top-level package has one, which made it.

    Raises:
        UserError: one comes from elsewhere, as by PYTHONPATH, or from a package that no lock has in this version; and
            `unhashed` holds neither its name nor "all".
    """
    if "all" in unhashed:
        return
    held = {name: getattr(module, "__dict__", {}) for name, module in list(sys.modules.items())}
    modules = {name: file for name, found in held.items() if (file := found.get("__file__"))}  # a lazy one stays so
    files = {name: file for name, file in sorted(modules.items()) if name.partition(".")[0] not in unhashed}
    places = sorted({resolved(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
    scripts = resolved(sysconfig.get_path("scripts"))
    strange = _strange(files, [*places, scripts, resolved(str(project.root)), *_compiled()])
    tops = {name: name.partition(".")[0] for name in strange}
    found = [f"{name} ({files[name]})" for name, top in tops.items() if top in strange or top not in files]
    if found:
        raise UserError(
            f"{some(found)}: loaded from outside the project and its environment, so no hash covers it. Move it into "
            f"the package, add it to requirements, or name it in unhashed.modules"
        )
    unlocked = [f"{top} ({owner})" for folder in places for top, owner in _unlocked(project, Path(folder), files)]
    if unlocked:
        raise UserError(
            f"{some(unlocked)}: loaded, but {LOCKS}/*.txt do not have it, so no hash covers it. Install what they have "
            f"with make setup, add it to pyproject.toml and run make lock, or name it in unhashed.modules"
        )


def resolved(folder: str) -> str:
    """os.path.realpath, which looks at each folder once: thousands of modules lie in some hundred of them."""
    return _resolved(folder) if folder.startswith("/") else os.path.realpath(folder)


@cache  # per process: it has loaded modules from there, so that no folder becomes a link
def _resolved(folder: str) -> str:
    above, name = os.path.split(folder)
    if name in ("", ".", ".."):
        return os.path.realpath(folder)
    with suppress(OSError):  # it is no link, or cannot be looked at
        Path(folder).readlink()
        return os.path.realpath(folder)
    return f"{_resolved(above).rstrip('/')}/{name}"


def is_below(folder: str, place: str) -> bool:
    """Whether a folder is another one or lies in it, by their names alone: Path.is_relative_to takes far longer."""
    return folder == place or folder.startswith(f"{place.rstrip('/')}/")


def _compiled() -> list[str]:
    """Where torch.compile keeps the kernels that it has made of code that is hashed; nowhere while it has made none."""
    made = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")  # which torch sets itself, where nobody has
    return [os.path.realpath(made)] if made and "torch._inductor.codecache" in sys.modules else []


def _strange(files: dict[str, str], ours: list[str]) -> list[str]:
    """Names of modules that lie neither below `ours` nor among Python's own, packages of other Pythons left out."""
    python = [resolved(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]

    @cache
    def known(at: str) -> bool:
        folder = resolved(at)  # of a file that is a link the name counts: Debian's own are links
        if any(is_below(folder, place) for place in ours):
            return True
        inside = [folder.removeprefix(place).split("/") for place in python if is_below(folder, place)]
        return any(not INSTALLED & set(parts) for parts in inside)

    return [name for name, file in files.items() if not known(split(file)[0])]


def _unlocked(project: Project, folder: Path, files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Top-level modules below `folder` that no lock has, each with the package that it is of."""
    locked = locked_files(project.root, folder)
    places = {at: _plain(at) for at in {split(file)[0] for file in files.values()}}
    below = {at: f"{place}/"[len(f"{folder}/") :] for at, place in places.items() if is_below(place, str(folder))}
    seen = set()
    for name, file in files.items():
        at, leaf = split(file)
        if at not in below or (top := name.partition(".")[0]) in seen or PATHFINDERS.match(top):
            continue
        path = f"{below[at]}{leaf}"
        if path not in locked and Path(file).is_file():  # torch names files that do not exist
            seen.add(top)
            yield top, _owner(folder, path) or file


split = cache(os.path.split)  # of thousands of modules, each time
_plain = cache(lambda folder: str(Path(folder)))  # without a double slash


@cache  # per process, which does not change its environment: the next one sees a change
def locked_files(root: Path, folder: Path) -> frozenset[str]:
    """The files that the packages in `folder` brought, named from there, as far as the locks have these packages."""
    pins = {pin for path in (root / LOCKS).glob("*.txt") for pin in pins_of(path).items()}
    return frozenset(
        file for package in folder.glob("*.dist-info") if _named(package) in pins for file in files_of(package)
    )


def pins_of(lock: Path) -> dict[str, str]:
    """The packages of a lock, each with its version."""
    return pins_in(lock.read_text())


def pins_in(text: str) -> dict[str, str]:
    """The packages of a lock of this text, each with its version."""
    return {normal(name): version for name, version in PIN.findall(text)}


def packages() -> dict[str, tuple[str, Path]]:
    """The packages of this environment: the version of each, and its .dist-info folder."""
    folders = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    found = {info: _named(info) for folder in folders for info in sorted(folder.glob("*.dist-info"))}
    return {name: (version, info) for info, (name, version) in found.items()}


def locks_here(folder: Path) -> list[Path]:
    """The locks of what a run needs that this environment was made from: those whose torch it has.

    None where that is another one.
    """
    version, _ = packages().get("torch", ("", folder))
    sets = [[folder / name for name in names if (folder / name).is_file()] for names in LOCK_SETS]
    return next((locks for locks in sets if any(pins_of(lock).get("torch") == version for lock in locks)), [])


def _named(package: Path) -> tuple[str, str]:
    """Name and version of an installed package, from the name of its .dist-info folder."""
    name, _, version = package.stem.rpartition("-")
    return normal(name), version


def normal(name: str) -> str:
    """A package's name as .dist-info folders have it, so that two spellings of it are one."""
    return re.sub(r"[-_.]+", "_", name).lower()


def files_of(package: Path) -> Iterator[str]:
    """The files that an installed package brought: the first column of its RECORD."""
    try:
        yield from (line.partition(",")[0] for line in (package / "RECORD").read_text().splitlines())
    except OSError:
        return


def _owner(folder: Path, path: str) -> str | None:
    """The installed package that brought a file, with its version."""
    for package in sorted(folder.glob("*.dist-info")):
        if path in files_of(package):
            return " ".join(_named(package))
    return None
