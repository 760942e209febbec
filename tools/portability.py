"""Which operations of torch give the same bits on every CPU: a table in the machinery, and docs/portability.md.

    python tools/portability.py
    python tools/portability.py --builds PYTHON

The second compares the build of torch that another Python has with the usual one, on this CPU, and writes that section
of the document alone.

Every operation that torch's own list of operators has samples for runs forward and backward, with the project's
portable switches: torch's samples, hard inputs for what works element by element, modules, losses, optimizers and
random numbers of the sizes of real models. It runs on this CPU, on others that CPUID faulting plays, and in part under
QEMU, which is slow. Each call that reaches ATen is one observation: a digest of its inputs and one of its outputs.
Calls with equal inputs are compared, so one operation that differs does not taint those that come after it.

What was measured already lies in build/portability and is kept; `make clean` removes it.
"""

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from about import about, commit
from bake import PACKAGE, ROOT, VENV, bake, make_venv

sys.path.insert(0, str(ROOT / "tests" / "hosts"))
import disguise
import spoof

FOLDER = ROOT / "build" / "portability"
DOCUMENT = ROOT / "docs" / "portability.md"
TABLE = ROOT / "{{cookiecutter.project}}" / "src" / "{{cookiecutter.package}}" / "repro" / "machine" / "portable.txt"
HERE, HERE_SHORT, QEMU = "this CPU", "this CPU, in short", "Haswell (QEMU)"


@dataclass(frozen=True)
class Cpu:
    """How a program runs on a CPU, and how much of all cases: see portability_cases.py."""

    command: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    extent: str = "whole"


def cpus() -> dict[str, Cpu]:
    """This CPU first, and those that others are played by."""
    if not disguise.faulting():
        sys.exit("this CPU cannot fault CPUID, as Intel's can under Linux 4.12 or later: measure on one that can")
    played = {
        name: Cpu(variables=spoof.environment(spoof.library(), profile))
        for name, profile in {"Haswell": "haswell", "Ice Lake": "icx", "Zen 2": "zen2", "Zen 4": "zen4"}.items()
    }
    emulated = {QEMU: Cpu(("qemu-x86_64", "-cpu", "Haswell"), extent="short")}
    return {HERE: Cpu(), HERE_SHORT: Cpu(extent="short")} | played | emulated


HEADER = """\
# Operations of torch {torch}, each with the kinds of numbers in which all CPUs gave one result. `-` marks those in
# which they did not. Written by the template's `make portability`.\
"""
TEXT = """\
# Which operations are portable

`make portability` ran torch {torch} with the portable switches in force: samples that torch has of its own operators,
forward and backward, in float32, float64 and integers. To these it adds hard inputs for what works element by element:
all exponents, subnormals, near 1, large arguments; contiguous, strided, transposed, with a scalar tail. Then come
layers, losses, attention, optimizers and random draws, of the sizes of real models. Each call that reached ATen was
observed, and calls with equal inputs were compared by their outputs, bit by bit. Measured at commit {commit}.

The CPU was {host}. CPUID faulting made it answer as each of the others, so that every library
took the kernels that it has for that CPU; the instructions were still its own. QEMU computes the instructions, too:
those for an approximate reciprocal or root give other bits on each maker's CPUs, and MKL's functions begin with them.
It is slow, and ran only what works element by element, reductions, distances, optimizers and random draws.

**{calls} calls of {operations} operations were compared; {equals} operations never differed.** A run that calls any
other one says so, and is out of the class `cpu-portable`.

## These differ

The numbers are calls that differ, of calls with equal inputs; in the first column from another call on the same CPU.

| operation | {head} |
|{rule}
{rows}

## These never differed

{equal}

## These have a derivative, and were not compared

{unmeasured}

Some samples of these operators did not run to their end: they have no deterministic kernel, want what a CPU does not
have, took too long, or crashed the emulator.

{failed}
"""
BUILDS = "\n## Two builds of one release\n"
OF_BUILDS = """
`python tools/portability.py --builds PYTHON` ran the same cases with torch {one} and {other} on one CPU.
{about}

**{calls} calls of {operations} operations with equal inputs were compared; {wrong} operations differ{which}.**
Builds in which none differs share the class `cpu-portable`.
"""
VARIABLES = """
import json
from {package}.repro.config.settings import Determinism
from {package}.repro.core.flags import missing_variables
print(json.dumps(missing_variables(Determinism(cpu="portable", relax=()))))
"""


def measured(project: Path, name: str, cpu: Cpu, python: Path = VENV / "bin" / "python") -> dict[str, Any]:
    """The observations on a CPU, which are made unless they lie in their file."""
    file = FOLDER / f"{name.replace(' ', '-')}.json"
    if not file.is_file():
        base = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        base |= {"PYTHONPATH": str(project / "src")}
        asked = [str(python), "-c", VARIABLES.format(package=PACKAGE)]
        strict = json.loads(subprocess.run(asked, env=base, check=True, capture_output=True, text=True).stdout)
        script = str(Path(__file__).with_name("portability_calls.py"))
        words = [*cpu.command, str(python), script, cpu.extent, f"{file}.part"]
        start = time.monotonic()
        subprocess.run(words, env=base | strict | cpu.variables, check=True)
        print(f"{file.name}: {time.monotonic() - start:.0f} s", flush=True)
        Path(f"{file}.part").rename(file)
    return json.loads(file.read_text())


def compared(seen: dict[str, dict[str, Any]]) -> dict[str, dict[str, tuple[int, int]]]:
    """By operation with its kind of number and by CPU: how many calls could be compared, how many differ.

    A call with two outputs for one input differs as well.
    """
    result: dict[str, dict[str, tuple[int, int]]] = {}
    for operation, whole in sorted(seen[HERE]["calls"].items()):
        for cpu in (cpu for cpu in seen if cpu != HERE_SHORT):
            here = seen[HERE_SHORT]["calls"].get(operation, {}) if cpu == QEMU else whole
            there = seen[cpu]["calls"].get(operation, {})
            both = here.keys() & there.keys()
            differ = sum(here[call] is None or here[call] != there[call] for call in both)
            result.setdefault(operation, {})[cpu] = (len(both), differ)
    return result


def marked(result: dict[str, dict[str, tuple[int, int]]]) -> dict[str, list[str]]:
    """The kinds of numbers of each operation, with `-` where it differs; those that all CPUs ran.

    QEMU did not run them all. It is the judge of functions that begin with an instruction for an approximate result.
    """
    table: dict[str, list[str]] = {}
    for operation, of_cpu in result.items():
        name, kind = operation.split()
        if all(both for cpu, (both, _) in of_cpu.items() if cpu != QEMU):
            table.setdefault(name, []).append("-" * any(differ for _, differ in of_cpu.values()) + kind)
    return table


def document(seen: dict[str, dict[str, Any]], result: dict[str, dict[str, tuple[int, int]]]) -> str:
    """docs/portability.md."""
    table = marked(result)
    cpus = [cpu for cpu in seen if cpu != HERE_SHORT]
    differ = {key: of for key, of in result.items() if any(wrong for _, wrong in of.values())}
    equal = [name for name, kinds in table.items() if not any(kind.startswith("-") for kind in kinds)]
    derivable = set(seen[HERE]["differentiable"])
    return TEXT.format(
        torch=seen[HERE]["torch"],
        commit=commit(),
        host="an Intel CPU" + " with AVX-512" * disguise.here_is("avx512f"),
        calls=sum(of[HERE][0] for of in result.values()),
        operations=len(table),
        equals=len(equal),
        head=" | ".join(cpus),
        rule="---|" * (len(cpus) + 1),
        rows="\n".join(_row(key, [of[cpu] for cpu in cpus]) for key, of in differ.items()),
        equal=_filled(equal),
        unmeasured=_filled(sorted(derivable - {key.split("(")[0] for key in table})) or "None.",
        failed=_filled(
            sorted({name for observed in seen.values() for name, why in observed["failed"].items() if is_told(why)})
        ),
    )


def is_told(why: str) -> bool:
    """Whether a failure is one of a sample, not of a hard number given alone to a function that wants more."""
    return not why.startswith(("TypeError", "ValueError", "IndexError"))


def _row(operation: str, counts: list[tuple[int, int]]) -> str:
    return " | ".join([f"| `{operation}`", *(f"{wrong} of {both}" for both, wrong in counts)]) + " |"


def _filled(names: list[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 120, break_long_words=False, break_on_hyphens=False)


def of_builds(one: dict[str, Any], other: dict[str, Any], place: str) -> str:
    """The section on two builds of torch, measured on one CPU in this place."""
    counted = {key: of[other["build"]] for key, of in compared({HERE: one, other["build"]: other}).items()}
    differ = [f"`{key}`" for key, (_, wrong) in counted.items() if wrong]
    return BUILDS + OF_BUILDS.format(
        one=one["build"],
        other=other["build"],
        about=place,
        calls=sum(both for both, _ in counted.values()),
        operations=len({key.split()[0] for key, (both, _) in counted.items() if both}),
        wrong=len(differ),
        which=": " * bool(differ) + ", ".join(differ),
    )


def compare_builds(project: Path, python: Path) -> None:
    """Measure with both Pythons, and write the section on builds."""
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], check=True, capture_output=True, text=True
    ).stdout.strip()
    here = about()
    one, other = measured(project, HERE, Cpu()), measured(project, f"{HERE} {version}", Cpu(), python)
    if one["torch"] != other["torch"]:
        sys.exit(f"{python}: torch {other['torch']} seen, {one['torch']} wanted: builds of one release are compared")
    DOCUMENT.write_text(DOCUMENT.read_text().partition(BUILDS)[0] + of_builds(one, other, here))
    print(f"written: {DOCUMENT.relative_to(ROOT)}")


def main() -> None:
    """Measure what is not measured yet, and write both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--builds", type=Path, metavar="PYTHON", help="the Python that has another build of torch")
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    project = bake(FOLDER)
    make_venv(project)
    if asked.builds:
        return compare_builds(project, asked.builds.absolute())
    known = cpus()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seen = dict(zip(known, pool.map(lambda name: measured(project, name, known[name]), known), strict=True))
    result = compared(seen)
    lines = [" ".join([name, *kinds]) for name, kinds in marked(result).items()]
    TABLE.write_text("\n".join([HEADER.format(torch=seen[HERE]["torch"]), *lines, ""]))
    builds = "".join(DOCUMENT.read_text().partition(BUILDS)[1:])
    DOCUMENT.write_text(document(seen, result) + builds)
    print(f"written: {TABLE.relative_to(ROOT)}, {DOCUMENT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
