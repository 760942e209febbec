"""What checking the data costs at the start of a run: every byte, and files that are known, in docs/hashing.md.

    python tools/hashing.py

The files hold their numbers and, after them, zeros that the disk does not store: they are hashed like any others, and
read faster than most disks allow. Every measurement is a process of its own, with the files in the page cache.
"""

import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import harness
from bake import ROOT
from harness import in_turn, printed, two_digits, within

RESULT = ROOT / "docs" / "hashing.md"
SETS = ((100_000, 1_000), (100_000, 100_000), (10, 1_000_000_000))  # files, and bytes of each
ROUNDS = 3  # of which the fastest counts: the others had less of the machine
ONE_BY_ONE = "one by one"
WAYS = ONE_BY_ONE, "every_byte", "remembered"  # the latter of `data.check`
OLD = 12  # seconds that the files rest, so that they are old enough to be remembered


# ---- in a process of its own


def seconds(way: str, folder: str, known: str) -> float:
    """How long it takes to read one file after another, as a run did once, or the check at the start of a run."""
    start = time.perf_counter()
    from samebits.address import manifest

    if way == ONE_BY_ONE:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                manifest.sha256_file(path)
    else:
        manifest.require_sha256(Path(folder), known, "", way)
    return time.perf_counter() - start


# ---- here


def fill(project: Path, files: int, size: int) -> tuple[str, str]:
    """Make the files; their folder, and its hash."""
    place = project.parent / "files"
    shutil.rmtree(place, ignore_errors=True)
    for number in range(files):
        folder = place / f"{number % 100:02}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{number:06}.bin").open("wb") as file:
            file.write(number.to_bytes(8, "big"))
            file.truncate(size)
    time.sleep(OLD)
    return str(place), printed(project, "-m", "samebits", "hash-data", "--set", f"data.raw={place}").strip()


def rows(project: Path, requested: Namespace) -> Iterator[list[str]]:
    """The lines of the table."""
    for files, size in SETS:
        held = fill(project, files, size)
        found = in_turn(WAYS, lambda way: within(project, seconds, way, *held), range(requested.rounds))  # noqa: B023
        times = [two_digits(min(found[way])) for way in WAYS]
        yield [f"{files:,}", f"{size:,}", f"{files * size / 1e9:g}", *times]


HEAD = "files | bytes of each | GB | each read, one by one | `every_byte` | `remembered`, and known"


if __name__ == "__main__":
    harness.measure(__doc__, RESULT, (HEAD, rows), rounds=ROUNDS)
