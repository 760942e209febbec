"""Checks of `samebits doctor`: the installed packages are those of the locks, file by file."""

import base64
import csv
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...address.locks import LOCKS, PATHFINDERS, locks_here, packages, pins_of
from ...base.text import some
from .found import FAULT, OK, UNKNOWN, Context, Found


def _wanted(context: Context) -> dict[str, str]:
    """The packages that the locks of this environment have, each with its version."""
    locks = locks_here(context.project.root / LOCKS)
    return {name: version for lock in locks for name, version in pins_of(lock).items()}


def installed(context: Context) -> Found:
    """Whether each locked package is installed in its version."""
    here, wanted = packages(), _wanted(context)
    if not wanted:
        seen = f"torch {here['torch'][0] if 'torch' in here else 'missing'}, and no lock has that"
        return Found(FAULT, seen, "make setup makes an environment from the locks")
    missing = [name for name in wanted if name not in here]
    other = [f"{n} {here[n][0]}, {v} locked" for n, v in wanted.items() if n in here and here[n][0] != v]
    if missing or other:
        seen = "; ".join(filter(None, [f"missing: {some(missing)}" if missing else "", some(other)]))
        return Found(FAULT, seen, "make setup installs what the locks say")
    return Found(OK, f"{len(wanted)} packages in their locked versions")


def package_files(context: Context) -> Found:
    """Whether the files of the locked packages are as they were installed, and nothing else runs when Python starts.

    A package's RECORD lists a SHA-256 of each file. It has none of itself: who edits both on purpose is not found.
    """
    here, wanted = packages(), _wanted(context)
    files = [each for name in wanted if name in here for each in _recorded(here[name][1])]
    if not files:
        return Found(UNKNOWN, "no package of the locks is here", "make setup makes an environment from the locks")
    brought = {site / name for site, name, _ in files if "/" not in name}
    added = [
        path.name
        for site in {info.parent for _, info in here.values()}
        for path in sorted([*site.glob("*.pth"), *site.glob("*customize.py")])
        if path not in brought and not PATHFINDERS.match(path.name)
    ]
    if added:
        seen = f"added: {some(added)}, which Python runs when it starts"
        return Found(FAULT, seen, "remove it, or add its package to pyproject.toml and run make lock")
    with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
        altered = sorted(filter(None, pool.map(_altered, files)))
    if altered:
        return Found(FAULT, f"altered: {some(altered)}", "rm -r .venv && make setup; a run would not notice it")
    return Found(OK, f"{len(files)} files are as their packages brought them")


def _recorded(info: Path) -> Iterator[tuple[Path, str, str]]:
    """The files that a package brought: folder, name, and SHA-256 as RECORD writes it; bytecode has none."""
    record = info / "RECORD"
    for name, sha256, *_ in csv.reader(record.read_text().splitlines() if record.is_file() else ()):
        if sha256.startswith("sha256="):
            yield info.parent, name, sha256.removeprefix("sha256=")


def _altered(file: tuple[Path, str, str]) -> str | None:
    site, name, wanted = file
    try:
        with (site / name).open("rb") as opened:
            seen = hashlib.file_digest(opened, "sha256").digest()
    except OSError:
        return name
    return None if base64.urlsafe_b64encode(seen).rstrip(b"=").decode() == wanted else name
