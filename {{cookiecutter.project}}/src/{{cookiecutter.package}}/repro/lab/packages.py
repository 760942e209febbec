"""Checks of `repro doctor`: the installed packages are those of the locks, file by file."""

import base64
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..asked import address
from ..asked.installed import PATHFINDERS, PIN
from ..differences import some
from .found import Context, Found, State


@dataclass(frozen=True)
class Package:
    """An installed package, and where its files lie."""

    name: str
    version: str
    record: Path


def _packages() -> dict[str, Package]:
    found = {}
    for folder in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for info in sorted(folder.glob("*.dist-info")):
            name, _, version = info.stem.rpartition("-")
            found[_normal(name)] = Package(_normal(name), version, info / "RECORD")
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins(context: Context) -> dict[str, dict[str, str]]:
    """Package -> version, by lock."""
    folder = context.project.root / address.LOCKS
    return {
        path.name: {_normal(name): version for name, version in PIN.findall(path.read_text())}
        for path in sorted(folder.glob("*.txt"))
    }


def _wanted(context: Context) -> dict[str, str]:
    """The pins of the locks that this environment was made from: those whose torch is installed here."""
    here, pins = _packages(), _pins(context)
    version = here["torch"].version if "torch" in here else ""
    cuda = pins.get("cuda.txt", {})
    if version and version == cuda.get("torch"):
        return cuda
    return {name: version for lock, held in pins.items() if lock != "cuda.txt" for name, version in held.items()}


def installed(context: Context) -> Found:
    """Whether each locked package is installed in its version."""
    here, wanted = _packages(), _wanted(context)
    missing = [name for name in wanted if name not in here]
    other = [f"{n} {here[n].version}, {v} locked" for n, v in wanted.items() if n in here and here[n].version != v]
    if missing or other:
        seen = "; ".join(filter(None, [f"missing: {some(missing)}" if missing else "", some(other)]))
        return Found(State.FAULT, seen, "make setup installs what the locks say")
    return Found(State.OK, f"{len(wanted)} packages in their locked versions")


def package_files(context: Context) -> Found:
    """Whether the files of the locked packages are as they were installed, and nothing else runs when Python starts.

    A package's RECORD lists a SHA-256 of each file. It has none of itself: who edits both on purpose is not found.
    """
    here, wanted = _packages(), _wanted(context)
    files = [each for name in wanted if name in here for each in _recorded(here[name].record)]
    brought = {site / name for site, name, _ in files}
    added = [
        path.name
        for site in {package.record.parents[1] for package in here.values()}
        for path in sorted([*site.glob("*.pth"), *site.glob("*customize.py")])
        if path not in brought and not PATHFINDERS.match(path.name)
    ]
    if added:
        seen = f"added: {some(added)}, which Python runs when it starts"
        return Found(State.FAULT, seen, "remove it, or add its package to pyproject.toml and run make lock")
    with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
        altered = sorted(filter(None, pool.map(_altered, files)))
    if altered:
        return Found(State.FAULT, f"altered: {some(altered)}", "rm -r .venv && make setup; a run would not notice it")
    return Found(State.OK, f"{len(files)} files are as their packages brought them")


def _recorded(record: Path) -> Iterator[tuple[Path, str, str]]:
    """The files that a package brought: folder, name, and SHA-256 as RECORD writes it; bytecode has none."""
    for line in record.read_text().splitlines() if record.is_file() else ():
        name, _, rest = line.rpartition(",")[0].rpartition(",")
        if rest.startswith("sha256="):
            yield record.parents[1], name.strip('"'), rest.removeprefix("sha256=")


def _altered(file: tuple[Path, str, str]) -> str | None:
    site, name, wanted = file
    try:
        with (site / name).open("rb") as opened:
            seen = hashlib.file_digest(opened, "sha256").digest()
    except OSError:
        return name
    return None if base64.urlsafe_b64encode(seen).rstrip(b"=").decode() == wanted else name
