"""Kill a training at each system call that changes its run directory, and compare it with one left alone.

strace lists the calls of one training. Then, for each of them, another training gets SIGKILL from strace as it enters
that very call, and is started again. Of a run that proves itself those calls are added that its own process makes for
the proof. `make chaos` runs this.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import table

ON_NAMES = "openat", "mkdir", "mkdirat", "rmdir", "rename", "renameat", "renameat2", "unlink", "unlinkat", "link"
ON_OPEN = "write", "pwrite64", "ftruncate", "fsync", "fdatasync"  # files and folders
LINE = re.compile(r"(\d+) +(\w+)\((.*)")
PROVE, PROOF = "SAMEBITS_PROVE", ".proof"  # the variable that says when, and the folder of what it makes
NUMBER = re.compile(r"\d{9}(-[0-9a-f]+)?")  # of a step, in the name of a checkpoint
RANDOM = ".tmp", ".seen-"  # how safetensors names a file until it is whole, and rank 0 one that others look for
MISSED = "not met"  # a kill whose call did not come
STEPS = 6
SETTINGS = ("train.epochs=2", "parallel.global_batch=480", "checkpoint.every=2", "checkpoint.keep=1",
            "tracking.enabled=false")  # fmt: skip
ARGUMENTS = [word for setting in SETTINGS for word in ("--set", setting)]


@dataclass(frozen=True)
class Point:
    """The nth time that a thread makes a call on a path, named from the run directory."""

    call: str
    path: str
    nth: int

    @property
    def file(self) -> str:
        """The path, without the number of a step."""
        kind = kind_of(self.path)
        return NUMBER.sub("N", self.path if kind == self.path else f"{kind}/…") or "the run directory"


def kind_of(path: str) -> str:
    """The path, named from the run directory; of what a proof makes, which has a copy of all files, the place."""
    first, *rest = path.split("/")
    return f"{first}/{rest[0]}" if first == PROOF and len(rest) > 1 else path


def points(log: str, out: Path, main: bool = False) -> list[Point]:
    """The calls in strace's log that change what lies in `out`: the first two and the last of each kind on a path.

    A call on a file whose name is drawn at random is known by another path that it names, or left out. With `main`,
    those of the first thread alone: strace would kill each process anew that trains a part again.
    """
    made: Counter[tuple[str, str, str]] = Counter()
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    calls = LINE.findall(log)
    for thread, call, rest in calls:
        changes = call != "openat" or "O_CREAT" in rest or "O_TRUNC" in rest
        paths = dict.fromkeys(path for path in named(call, rest) if Path(path).is_relative_to(out))
        for path in paths:
            made[thread, call, path] += 1
        stable = [path for path in paths if not any(word in path for word in RANDOM)]
        if changes and stable and (not main or thread == calls[0][0]):
            path = stable[0 if call == "rename" else -1]  # of rename, strace compares the first one alone
            name = inside(path, out)
            found[call, kind_of(name)].append(Point(call, name, made[thread, call, path]))
    return [point for each in found.values() for point in dict.fromkeys([*each[:2], each[-1]])]


def inside(path: str, out: Path) -> str:
    """A path named from the run directory; empty for that itself."""
    return "" if Path(path) == out else Path(path).relative_to(out).as_posix()


def named(call: str, rest: str) -> Iterator[str]:
    """The absolute paths by which strace knows a call: of open files and folders, and of names that it is given."""
    yield from re.findall(r"<(/[^<>]*)>", rest.partition('"')[0] if call in ON_OPEN else rest)
    if call in ON_NAMES:
        yield from re.findall(r'"(/[^"]*)"', rest)


def strace(out: Path, *options: str) -> int:
    """The exit code of a training under strace."""
    command = ["strace", "-f", "-y", "-qq", *options, sys.executable, "-m", "samebits", "train"]
    with out.with_suffix(".log").open("a") as log:
        return subprocess.run(
            [*command, *ARGUMENTS, "--out", str(out)], stdout=log, stderr=log, cwd=out.parent
        ).returncode


def listed(out: Path, main: bool = False) -> list[Point]:
    """The points of a training in `out`; with `main`, of its first thread alone."""
    log = out.with_suffix(".strace")
    if strace(
        out, "--seccomp-bpf", "-e", f"trace={','.join((*ON_NAMES, *ON_OPEN))}", "-e", "signal=none", "-o", str(log)
    ):
        sys.exit(out.with_suffix(".log").read_text())
    return points(log.read_text(errors="replace"), out, main)


def strike(point: Point, out: Path) -> bool:
    """Whether a training in `out` was killed there."""
    inject = f"inject={point.call}:signal=KILL:when={point.nth}"
    code = strace(out, "-o", os.devnull, "-e", f"trace={point.call}", "-e", inject, "-P", str(out / point.path))
    return code in (-9, 137)


def section(project: Path, content: Callable[[Path], dict[str, str]]) -> str:
    """Do it all; return the Markdown. `content` gives the digests of a run that must be equal."""
    from victim import Victim  # of the library's tests

    def ended(out: Path) -> dict[str, str]:
        victim = Victim(out, *ARGUMENTS)
        if victim.end(3600):
            sys.exit(out.with_suffix(".log").read_text()[-3000:])
        return content(out)

    os.environ[PROVE] = "never"
    alone = ended(project / "calls-alone")
    half = Victim(project / "calls-half", *ARGUMENTS)
    if not half.until(lambda: half.news() >= STEPS // 2):
        sys.exit("the training ended before it was killed")
    half.kill()

    def begun(name: str, resumed: bool) -> Path:
        out = project / f"calls-{name}"
        if resumed:
            shutil.copytree(half.out, out)
        return out

    def outcomes(kind: str, plan: list[Point], wanted: dict[str, str]) -> list[tuple[Point, str]]:
        """The verdicts on kills at these points, beside a run of this kind that was left alone."""

        def outcome(numbered: tuple[int, Point]) -> tuple[Point, str]:
            number, point = numbered
            out = begun(f"{kind}-{number:03}", kind == "resumed")
            verdict = MISSED if not strike(point, out) else "EQUAL" if ended(out) == wanted else "DIFFERENT"
            print(f"{kind}: {point.call} {point.file} {point.nth}: {verdict}", flush=True)
            return point, verdict

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(outcome, enumerate(plan)))

    found = []
    for kind in "begun", "resumed":
        found += outcomes(kind, listed(begun(kind, kind == "resumed")), alone)
    os.environ[PROVE] = ""
    proved = ended(project / "calls-alone-proved")
    known = {(point.call, point.file) for point, _ in found}
    own = [
        point for point in listed(begun("proved", resumed=False), main=True) if (point.call, point.file) not in known
    ]
    return markdown(found + outcomes("proved", own, proved))


def markdown(outcomes: list[tuple[Point, str]]) -> str:
    """The outcomes as a table, a line for each file."""
    verdicts = Counter(verdict for _, verdict in outcomes)
    files: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for point, verdict in outcomes:
        files[point.file].append((point.call, verdict))

    def rows() -> Iterator[list[object]]:
        for file, met in sorted(files.items()):
            calls = ", ".join(f"`{call}`" for call in sorted({call for call, _ in met}))
            killed = [verdict for _, verdict in met if verdict != MISSED]
            yield [file if " " in file else f"`{file}`", calls, len(killed), killed.count("EQUAL")]

    counted = ", ".join(f"{count} **{verdict}**" for verdict, count in sorted(verdicts.items()))
    return f"## At each system call\n\n{counted}.\n\n{table('file | system calls | killed | EQUAL', rows())}"
