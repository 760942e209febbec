"""What checking the data costs at the start of a run: every byte, and files that are known, in docs/hashing.md.

    python tools/hashing.py

The files hold their numbers and, after them, zeros that the disk does not store: they are hashed like any others, and
read faster than most disks allow. Every measurement is a process of its own, with the files in the page cache.
"""

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from about import about
from bake import NAME, ROOT, VENV, bake, make_venv
from order import environ, number

PROJECT = ROOT / "build" / "hashing" / NAME
FOLDER = PROJECT.parent / "files"
RESULT = ROOT / "docs" / "hashing.md"
SETS = ((100_000, 1_000), (100_000, 100_000), (10, 1_000_000_000))  # files, and bytes of each
REPEATS = 3  # of which the fastest counts: the others had less of the machine
OLD = 12  # seconds that the files rest, so that they are old enough to be remembered


# ---- in a process of its own


def one_by_one(folder: Path, known: str) -> None:
    """Each file of a folder read, one after another, as a run did before it remembered any."""
    from repro_project.repro.address.manifest import sha256_file

    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sha256_file(path)


def checked(check: str) -> Callable[[Path, str], None]:
    """The check of a folder, whose hash is known, at the start of a run."""

    def work(folder: Path, known: str) -> None:
        from repro_project.repro.address import manifest

        manifest.require(folder, known, "", check)

    return work


WAYS = {"one by one": one_by_one, "every byte": checked("every_byte"), "remembered": checked("remembered")}


def seconds(way: str, folder: Path) -> float:
    """How long one way takes, its imports included."""
    known = folder.with_suffix(".sha256").read_text()
    start = time.perf_counter()
    WAYS[way](folder, known)
    return time.perf_counter() - start


# ---- here


def fill(files: int, size: int) -> None:
    """Make the files, and have the project know the hash of their folder."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for place in range(files):
        folder = FOLDER / f"{place % 100:02}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{place:06}.bin").open("wb") as file:
            file.write(place.to_bytes(8, "big"))
            file.truncate(size)
    time.sleep(OLD)
    command = [VENV / "bin" / "python", "-m", "repro_project", "hash-data", "--set", f"data.raw={FOLDER}"]
    printed = subprocess.check_output(command, cwd=PROJECT, env=environment(), text=True)
    FOLDER.with_suffix(".sha256").write_text(printed.strip())


def environment() -> dict[str, str]:
    return environ() | {"PYTHONPATH": str(PROJECT / "src")}


def measured(way: str) -> float:
    """The fastest of processes of their own."""
    command = [VENV / "bin" / "python", __file__, "--measure", way]
    return min(json.loads(subprocess.check_output(command, cwd=PROJECT, env=environment())) for _ in range(REPEATS))


def rows() -> Iterator[str]:
    """The lines of the table."""
    for files, size in SETS:
        fill(files, size)
        times = " | ".join(number(measured(way)) for way in WAYS)
        yield f"| {files:,} | {size:,} | {files * size / 1e9:g} | {times} |"


def main() -> None:
    """Measure everything and write the document."""
    make_venv(bake(PROJECT.parent))
    place, lines = about(), []
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    shutil.rmtree(FOLDER)
    RESULT.write_text(DOCUMENT.format(rows="\n".join(lines), place=place, repeats=REPEATS))


DOCUMENT = """# Checking the data at the start of a run

Written by `make hashing`. {place}

Seconds until a run knows that its files are those of its content address, imports included.

| files | bytes of each | GB | each read, one by one | `every_byte` | `remembered`, and known |
|---:|---:|---:|---:|---:|---:|
{rows}

- One by one: as every rank did before files were remembered. Now one rank of each host checks for all of its ranks,
  with two threads for each core (`every_byte`), or reads no file whose size, inode and dates are as they were
  (`remembered`, the default of `data.check`). The first check of a folder reads every byte in either case.
- The files are in the page cache, and sparse: a first number, then zeros that the disk does not store. From a disk the
  first two columns take as long as the disk does; the last one reads names and dates alone.
- Each number is the fastest of {repeats} processes.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(seconds(arguments.measure, arguments.folder)))
    else:
        main()
