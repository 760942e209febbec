"""Which operations of torch give the same bits on every CPU: a table in the library, and docs/portability.md.

    python tools/portability.py
    python tools/portability.py --builds PYTHON

The second compares the build of torch that another Python has with the usual one, on this CPU, and writes that section
of the document alone.

Every operation that torch's own list of operators has samples for runs forward and backward, with the project's
portable flags: torch's samples, hard inputs for what works element by element, modules, losses, optimizers and
random numbers of the sizes of real models. It runs on this CPU, on others that CPUID faulting plays, and in part under
QEMU, which is slow. Each call that reaches ATen is one observation: a digest of its inputs and one of its outputs.
Calls with equal inputs are compared, so one operation that differs does not taint those that come after it.

What was measured already lies in build/portability and is kept; `make clean` removes it.
"""

import argparse
import json
import os
import sys
import textwrap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bake import ROOT, VENV
from harness import about, commit, prepared, table, within, write

sys.path.insert(0, str(ROOT / "tests" / "hosts"))
import disguise
import spoof

FOLDER = ROOT / "build" / "portability"
DOCUMENT = ROOT / "docs" / "portability.md"
TABLE = ROOT / "samebits" / "environment" / "portable.txt"
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
BUILDS = "\n## Two builds of one release\n"
OF_BUILDS = """
`python tools/portability.py --builds PYTHON` ran the same cases with torch {one} and {other} on one CPU.
{about}

**{calls} calls of {operations} operations with equal inputs were compared; {wrong} operations differ{which}.**
Builds in which none differs share the class `cpu-portable`.
"""


def strict() -> dict[str, str]:
    """The variables that the portable flags need."""
    settings, flags = (import_module(f"samebits.{name}") for name in ("config.settings", "core.flags"))
    return flags.missing_variables(settings.Determinism(cpu="portable", relax=()))


def observed(extent: str) -> dict[str, Any]:
    """What the CPU that runs this gives."""
    return import_module("portability_calls").observed(extent)  # it needs torch


def build() -> str:
    """The version of a Python's torch."""
    return import_module("torch").__version__


def measured(project: Path, name: str, cpu: Cpu, python: Path = VENV / "bin" / "python") -> dict[str, Any]:
    """The observations on a CPU, which are made unless they lie in their file."""
    file = FOLDER / f"{name.replace(' ', '-')}.json"
    if not file.is_file():
        own = {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None}
        variables = own | within(project, strict, variables=own) | cpu.variables
        start, launcher = time.monotonic(), [*cpu.command, str(python)]
        found = within(project, observed, cpu.extent, variables=variables, launchers=[launcher])
        print(f"{file.name}: {time.monotonic() - start:.0f} s", flush=True)
        file.write_text(json.dumps(found))
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
    """What docs/portability.md holds of a measurement."""
    listed, derivable = marked(result), set(seen[HERE]["differentiable"])
    cpus = [cpu for cpu in seen if cpu != HERE_SHORT]
    equal = [name for name, kinds in listed.items() if not any(kind.startswith("-") for kind in kinds)]
    rows = (
        [f"`{operation}`", *("{1} of {0}".format(*of[cpu]) for cpu in cpus)]
        for operation, of in result.items()
        if any(wrong for _, wrong in of.values())
    )
    counted = sum(of[HERE][0] for of in result.values()), len(listed), len(equal)
    failed = {name for observed in seen.values() for name, why in observed["failed"].items() if is_told(why)}
    host = "an Intel CPU" + " with AVX-512" * disguise.here_is("avx512f")
    return "\n\n".join(
        [
            f"torch {seen[HERE]['torch']}; {host}; commit {commit()}. "
            "**{} calls of {} operations were compared; {} operations never differed.**".format(*counted),
            "## These differ",
            table(" | ".join(["operation", *cpus]), rows),
            "## These never differed",
            _filled(equal),
            "## These have a derivative, and were not compared",
            _filled(sorted(derivable - {key.split("(")[0] for key in listed})) or "None.",
            "## Some samples of these did not run to their end",
            _filled(sorted(failed)),
        ]
    )


def is_told(why: str) -> bool:
    """Whether a failure is one of a sample, not of a hard number given alone to a function that wants more."""
    return not why.startswith(("TypeError", "ValueError", "IndexError"))


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
    here, version = about(), within(project, build, launchers=[[str(python)]])
    one, other = measured(project, HERE, Cpu()), measured(project, f"{HERE} {version}", Cpu(), python)
    if one["torch"] != other["torch"]:
        sys.exit(f"{python}: torch {other['torch']} seen, {one['torch']} wanted: builds of one release are compared")
    DOCUMENT.write_text(DOCUMENT.read_text().partition(BUILDS)[0] + of_builds(one, other, here))


def main() -> None:
    """Measure what is not measured yet, and write both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--builds", type=Path, metavar="PYTHON", help="the Python that has another build of torch")
    requested = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with prepared() as project:
        if requested.builds:
            return compare_builds(project, requested.builds.absolute())
        known = cpus()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(lambda name: measured(project, name, known[name]), known)
            seen = dict(zip(known, found, strict=True))
    result = compared(seen)
    lines = [" ".join([name, *kinds]) for name, kinds in marked(result).items()]
    TABLE.write_text("\n".join([HEADER.format(torch=seen[HERE]["torch"]), *lines, ""]))
    write(DOCUMENT, document(seen, result))


if __name__ == "__main__":
    main()
