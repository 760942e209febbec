"""`samebits audit`: the operations of one step and the lines of the owner's code that put bits at risk.

Operations are seen in a child (`audited.py`), which makes the first step of a training; code is read, not run.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...address.address import files
from ...base.files import read_json
from ...base.project import Project
from ...config.params import load
from ...config.settings import Settings
from ...core.errors import Preempted, UserError
from ...core.flags import stated_variables
from ...start import trainings
from . import rules
from .rules import Finding
from .syntax import Source

FOLDER = Path("build", "audit")
# The first step, as the owner asks for it: nothing is tracked, and no compiler hides the operations.
ONE_STEP: Mapping[str, Any] = {
    "trace.values": 0,
    "trace.level": "off",
    "tracking.enabled": False,
    "receipt.key": "",
    "loader.workers": 0,
    "compute.compile": False,
}
ENDS = (0, Preempted.exit_code)
GROUPS = ("Operations", "Portability", "Code")
ANOTHER = "deterministic by another kernel alone, which the flag deterministic_debug_mode chooses"
RELAXED = "not deterministic: the flag deterministic_debug_mode is relaxed"


@dataclass(frozen=True)
class Audit:
    """All that was found, and what was looked at."""

    findings: list[Finding]
    step: Mapping[str, Any]  # what the child saw
    files: int
    notes: list[str]
    failed: str = ""  # why the step did not come to its end

    @property
    def counted(self) -> list[Finding]:
        """Those that are no hints, and that no comment silences."""
        return [each for each in self.findings if not (each.hint or each.silenced)]

    def lines(self) -> Iterator[str]:
        """The table, and a sentence."""
        for group in GROUPS:
            if shown := [each for each in self.findings if each.group == group and not each.silenced]:
                yield group
                for each in shown:
                    yield from each.lines()
        hints = sum(each.hint and not each.silenced for each in self.findings)
        silenced = sum(each.silenced for each in self.findings)
        more = [_many(hints, "hint")] * bool(hints) + [f"{silenced} silenced"] * bool(silenced)
        count = _many(len(self.counted), "finding") + (f" ({', '.join(more)})" if more else "")
        until = "until the step failed" if self.failed else "which make the weights and one step"
        yield f"{count} in {self.step['calls']} calls, {until}, and in {self.files} files"
        yield from self.notes

    def record(self) -> dict[str, Any]:
        """The same as JSON has it."""
        found = {group.lower(): [each.record() for each in self.findings if each.group == group] for group in GROUPS}
        seen = {name: self.step[name] for name in ("calls", "held", "torch", "cuda")}
        return {
            **found, "findings": len(self.counted), **seen, "files": self.files, "notes": self.notes,
            "failed": self.failed,
        }  # fmt: skip


def _many(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'s' * (number != 1)}"


def audited(project: Project, schema: type[Settings], overrides: Sequence[str]) -> Audit:
    """The findings in this project.

    Raises:
        UserError: a key, a variable or a file of the owner's is wrong, or the training did not begin.
    """
    settings = load(schema, overrides=overrides)
    paths = [project.package / name for name in _of_owner(project)]
    sources = {str(path.resolve()): Source(path, _shown(project, path)) for path in paths}
    code = [each for source in sources.values() for each in rules.found(source)]
    step, failed = _one_step(project, settings, overrides)
    found = list(_of_step(project, step, sources, settings))
    found.sort(key=lambda each: (GROUPS.index(each.group), each.file, each.line, each.name))
    return Audit([*found, *code], step, len(sources), list(_notes(step, settings, failed)), failed)


def _of_owner(project: Project) -> list[str]:
    """The Python files of the owner's, named from the package."""
    return [name for name in files(project.package) if name.endswith(".py")]


def _shown(project: Project, path: Path) -> str:
    """A path for display: from the project's root, and in one line whatever it holds."""
    name = str(path.relative_to(project.root) if path.is_relative_to(project.root) else path)
    return name if name.isprintable() else ascii(name)[1:-1]


def _one_step(project: Project, settings: Settings, overrides: Sequence[str]) -> tuple[Mapping[str, Any], str]:
    """What the child saw, and why its step did not come to its end, if it did not."""
    folder = project.root / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = folder / "step.json"
    requested, failed = trainings.sets(overrides), ""
    words = trainings.command(trainings.AUDITED, ONE_STEP, report, "--out", folder / "run", *requested)
    environ = trainings.environment(project) | stated_variables(settings.options.determinism)
    try:
        said = "the training did not begin"
        try:
            trainings.run(project, words, ENDS, environ)
        except trainings.Ended as ended:
            said = ended.last or f"{said}: exit code {ended.code}"
            failed = f"the step did not end, exit code {ended.code}:\n{ended.last}"
        step = read_json(report) if report.is_file() else {"calls": 0}
        if not step["calls"]:
            raise UserError(said)
        return step, failed
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _of_step(
    project: Project, step: Mapping[str, Any], sources: Mapping[str, Source], settings: Settings
) -> Iterator[Finding]:
    for met in step["operations"]:
        why = ["it raises here: it has no deterministic kernel"] if met["raised"] else []
        for verdict in met["verdicts"]:
            place = "on CUDA" if verdict["device"] == "cuda" else "here"
            kernel = "it raises, for it has no deterministic kernel" if verdict["throws"] else ANOTHER
            if not (met["raised"] and verdict["throws"]):
                why.append(f"{place}: {kernel if step['strict'] else RELAXED}")
        names = dict.fromkeys(verdict["name"] for verdict in met["verdicts"])
        message = f" ({', '.join(names)})" if names else ""
        yield _at(project, "Operations", met, sources, f"{met['operation']}{message}", "; ".join(dict.fromkeys(why)))
    for met in step["portability"] if not settings.compute.compile else ():
        yield _at(project, "Portability", met, sources, met["operation"], met["why"])


def _at(
    project: Project, group: str, met: Mapping[str, Any], sources: Mapping[str, Source], name: str, why: str
) -> Finding:
    source = sources.get(str(Path(met["file"]).resolve()) if met["file"] else "")
    file = source.name if source else _shown(project, Path(met["file"])) if met["file"] else ""
    silenced = bool(source and rules.is_fine(source, met["line"]))
    return Finding(group, file, met["line"], name, why, met["instead"], met["module"], silenced=silenced)


def _notes(step: Mapping[str, Any], settings: Settings, failed: str) -> Iterator[str]:
    """What a reader is to know of the verdicts."""
    if step["held"]:
        held = ", ".join(f"{name} ({flag})" for name, flag in sorted(step["held"].items()))
        yield f"held by a flag: {held}"
    if not step["cuda"]:
        yield f"verdicts on CUDA are from the catalogue of torch {step['torch']}: there is no GPU here"
    if not step["listed"]:
        yield "torch has no catalogue here: Python dropped its docstrings (-OO), so operations are not judged"
    if step["unknown"]:
        yield f"not judged, for this table of operations does not know them: {', '.join(step['unknown'])}"
    if settings.compute.compile:
        yield "compute.compile was off for this step: the compiler makes its kernels from these operations"
    if failed:
        yield "portability is not judged: the step failed"
    elif settings.compute.compile or not step["portable"]:
        yield "portability is not judged: this config does not ask for the class cpu-portable, or the device has none"
