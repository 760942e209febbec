"""What all tools share that measure: a project, functions that run in it by themselves and in turns, tables, documents.

A tool is a table of ways, the function that one way runs, and a document that has a place for the outcome:

    with prepared() as project:
        place, found = about(), in_turn(WAYS, lambda way: within(project, measure, way), range(rounds))
    write(RESULT, place, table(HEAD, rows(found)))

Started as a program this is the process of `within`: harness.py FILE FUNCTION RESULT ARGUMENTS-AS-JSON
"""

import argparse
import inspect
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from bake import PACKAGE, ROOT, VENV, bake, in_venv, make_venv, venv_of

sys.path.append(str(ROOT / "measure"))  # for tools of either folder

MARKS = "<!-- measured -->", "<!-- end -->"
BETWEEN = re.compile(".*?".join(map(re.escape, MARKS)), re.DOTALL)
W, T = TypeVar("W"), TypeVar("T")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# ---- where


def about() -> str:
    """A line on the machine, torch and the commit. Call it before what is measured makes the machine busy."""
    models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    torch = printed(ROOT, "-c", "from importlib.metadata import version; print(version('torch'))").strip()
    cpu, busy = models[0] if models else platform.machine(), os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {cpu}; torch {torch}; commit {commit()}; load before it began: {busy:.1f}."


def commit() -> str:
    """The commit of this work tree, and whether something other than docs/ was changed since."""
    requested = ["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", ":!docs"]
    done = [subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True) for words in requested]
    known, changed = (each.stdout.strip() for each in done)
    return f"{known}{'-dirty' * bool(changed)}" if known else "unknown"


@contextmanager
def prepared(starter: str = "digits", change: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """A generated project with its data, for a while, and the environment that it trains in; `change` edits it."""
    (ROOT / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ROOT / "build", prefix="measure-") as folder:
        project = bake(Path(folder), starter=starter)
        if change:
            change(project)
        make_venv(project, venv := venv_of(starter))
        printed(project, "-m", "samebits", "prepare", venv=venv)
        yield project


# ---- what runs


def printed(project: Path, *words: object, ends: Sequence[int] = (0,), venv: Path = VENV, **variables: str) -> str:
    """What python prints in a project, with one of these exit codes.

    Raises:
        SystemExit: it ended with another one.
    """
    command, env = [str(venv / "bin" / "python"), *map(str, words)], in_venv(project, venv=venv) | variables
    done = subprocess.run(command, cwd=project, env=env, text=True, capture_output=True)
    if done.returncode not in ends:
        sys.exit(f"{' '.join(command[1:])} ended with {done.returncode}:\n{done.stdout}{done.stderr[-3000:]}")
    return done.stdout


def within(
    project: Path,
    function: Callable[..., T],
    *given: Any,
    ranks: int = 0,
    venv: Path = VENV,
    variables: Mapping[str, str | None] = {},
    launchers: Sequence[Sequence[str]] = (),
) -> T:
    """What a function of a tool returns in a process of its own, in the project and with its code.

    Args:
        given: JSON values.
        ranks: with torchrun, on so many; the value is that of rank 0. 0: without.
        variables: of the environment; None takes one away.
        launchers: commands in place of that, which run python's arguments, all at once.

    Raises:
        SystemExit: the process ended with an error.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc-per-node={ranks}"]
    file, every = Path(inspect.getfile(function)).resolve(), in_venv(project, venv=venv) | dict(variables)
    env = {name: value for name, value in every.items() if value is not None}
    commands = launchers or [[str(venv / "bin" / "python"), *(torchrun if ranks else [])]]
    with TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        words = [__file__, str(file), function.__name__, str(result), json.dumps(given)]
        started = [subprocess.Popen([*command, *words], cwd=project, env=env) for command in commands]
        if any([process.wait() for process in started]):  # noqa: C419 (all of them are waited for)
            sys.exit(f"{file.name}: {function.__name__}{given} ended with an error")
        return json.loads(result.read_text())


def configured(*settings: str) -> Any:
    """The project's config, its flags in force: in a process of `within`, before torch is imported."""
    flags = import_module("samebits.core.flags")
    config_class = import_module(f"{PACKAGE}.config").Config
    config = import_module("samebits.config.params").load(config_class, Path("params.yaml"), settings)
    flags.set_environment(config.determinism)
    loading = import_module("samebits.base.loading")
    loading.load(*loading.TRAINING)
    flags.apply(config.determinism)
    return config


def in_turn(ways: Iterable[W], run: Callable[[W], T], rounds: Iterable[object]) -> dict[W, list[T]]:
    """What each way gave in each round. A round begins with another way than the one before it."""
    ways = list(ways)
    found: dict[W, list[T]] = {way: [] for way in ways}
    for turn, _ in enumerate(rounds):
        first = turn % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            found[way].append(run(way))
    return found


# ---- what is told


def row(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown; each line is also printed as soon as it is there."""
    lines = [row(head), f"|{'---|' * len(head.split(' | '))}"]
    for cells in rows:
        lines.append(row(*cells))
        print(lines[-1], flush=True)
    return "\n".join(lines)


def spread(low: float, middle: float, high: float, form: str = ".2f") -> str:
    """A number with what it lies between."""
    return f"{middle:{form}} ({low:{form}} … {high:{form}})"


def two_digits(value: float) -> str:
    """And not a whole number's fewer."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def marked(out: Path) -> str:
    """The text of a document that a table has a place in; an empty one where there is none yet."""
    text = out.read_text() if out.is_file() else "\n".join(MARKS) + "\n"
    if not BETWEEN.search(text):
        sys.exit(f"{out}: no lines {' and '.join(MARKS)} seen, between which the table is to stand")
    return text


def write(out: Path, *made: str) -> None:
    """Put what was measured into a document, between its marks."""
    inside = "\n".join([MARKS[0], "\n\n".join(made), MARKS[1]])
    out.write_text(BETWEEN.sub(lambda _: inside, marked(out)))


def arguments(
    description: str | None,
    out: Path | None,
    parts: Iterable[str] = (),
    fewest: int = 1,
    ways: Iterable[str] = (),
    **amounts: float | Path,
) -> argparse.Namespace:
    """What a command line asks for: parts of the table, ways, rounds or another amount, a document with its place."""
    parser = argparse.ArgumentParser(description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    choices = {"only": list(parts), "way": list(ways)}
    for name, known in choices.items():
        if known:
            parser.add_argument(f"--{name}", action="append", choices=known, help="this one alone; repeatable")
    if out:
        parser.add_argument("--out", type=Path, default=out, help="the document")
    for name, amount in amounts.items():
        parser.add_argument(f"--{name}", type=type(amount), default=amount, help="default: %(default)s")
    requested = parser.parse_args()
    if (rounds := getattr(requested, "rounds", fewest)) < fewest:
        parser.error(f"--rounds {rounds} seen, {fewest} or more wanted for an interval")
    if out:
        marked(requested.out)
    for name, known in choices.items():
        setattr(requested, name, getattr(requested, name, None) or known)
    return requested


def measure(
    description: str | None,
    out: Path,
    *tables: tuple[str, Callable[[Path, argparse.Namespace], Iterable[Iterable[object]]]],
    starter: str = "digits",
    change: Callable[[Path], object] | None = None,
    parts: Iterable[str] = (),
    fewest: int = 1,
    **amounts: float | Path,
) -> None:
    """The whole of most tools: measure in a project what the command line asks for, and write it into the document.

    `tables` are heads, and functions that give the rows: of the project and of `arguments`.
    """
    requested = arguments(description, out, parts, fewest, **amounts)
    with prepared(starter, change) as project:
        place = about() + (f" {requested.rounds} rounds." if "rounds" in amounts else "")
        write(requested.out, place, *(table(head, rows(project, requested)) for head, rows in tables))


def leave(found: object) -> None:
    """Write what `within` returns; for functions that end their process themselves."""
    if os.environ.get("RANK", "0") == "0":
        Path(sys.orig_argv[-2]).write_text(json.dumps(found))


def main() -> None:
    """Call a function of a tool."""
    file, name, _, given = sys.argv[1:]
    sys.path.append(str(Path(file).parent))
    leave(getattr(import_module(Path(file).stem), name)(*json.loads(given)))


if __name__ == "__main__":
    main()
