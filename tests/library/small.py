"""A small project, in which a stage runs without a training: DVC seems to run it, modules seem to be loaded."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from samebits.base.project import Project
from samebits.core.errors import UserError
from samebits.guards.stages import watched

PIPELINE = """
stages:
  prepare:
    deps: ["${data.raw}", src/tides/__init__.py, src/tides/data.py, vendor/samebits/core]
    params: [data, determinism]
  train:
    deps: [data/prepared, ./requirements/train-cpu.txt, src/tides, vendor/samebits/core]
    params: [seed, data, determinism]
  sweep:
    foreach: [1, 2]
    do:
      deps: [requirements/train-cpu.txt, src/tides, vendor/samebits/core]
      params: [seed, data]
"""
PARAMS = "seed: 0\ndata: {raw: data/raw.csv, shift: 1}\ndeterminism: {cpu: portable}\ntracking: {uri: here}\n"
SECTIONS = ["seed", "data", "determinism"]
FILES = {
    "dvc.yaml": PIPELINE,
    "params.yaml": PARAMS,
    "requirements/train-cpu.txt": "numpy==2.4.6  # via tides\n",
    "README.md": "\n",
    **{f"src/tides/{name}.py": "" for name in ("__init__", "data", "train")},
    **{f"vendor/samebits/{name}.py": "" for name in ("run", "cli", "analysis/diff")},
}


def module(name: str, file: Path, text: str) -> ModuleType:
    """A module that seems to come from a file."""
    made = ModuleType(name)
    exec(compile(text, str(file), "exec"), made.__dict__)
    return made


@dataclass
class Case:
    """A small project, and the means to say that DVC runs a stage of it and that modules are loaded."""

    project: Project
    monkeypatch: pytest.MonkeyPatch
    before: tuple[str, ...]  # top-level modules of the tests themselves, which lie elsewhere

    def write(self, name: str, text: str) -> None:
        path = self.project.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.project.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def load(self, file: str | Path) -> None:
        """Have a module in this process that came from a file, named from the project's root."""
        module = ModuleType(f"of {file}")
        module.__file__ = str(self.project.root / file)
        self.monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(self, stage: str, during: Callable[[], None] = lambda: None, unhashed: tuple[str, ...] = ()) -> None:
        """The stage under DVC, or without it where `stage` is empty; `during` happens while it runs."""
        self.monkeypatch.setenv("DVC_STAGE", stage)
        prepares = stage == "prepare"
        sections = ["data", "determinism"] if prepares else SECTIONS
        with watched(self.project, sections, whole=not prepares, unhashed=unhashed or self.before):
            during()

    def refusal(self, stage: str, during: Callable[[], None] = lambda: None) -> str:
        with pytest.raises(UserError) as refused:
            self.run(stage, during)
        assert "\n" not in str(refused.value)
        return str(refused.value)


def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A project in which nothing is wrong; this process goes into its folder."""
    before = tuple({name.partition(".")[0] for name in sys.modules})
    case = Case(Project(folder / "src" / "tides"), monkeypatch, before)
    for name, text in FILES.items():
        case.write(name, text)
    monkeypatch.chdir(folder)
    return case
