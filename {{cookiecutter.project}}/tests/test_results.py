"""`repro check`: whether a run gave what the locks expect, in words and in the exit code."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clone import git
from conftest import PACKAGE, PROJECT, python
from project.repro.errors import Failure, Refused
from project.repro.files import write_json
from project.repro.lab.results import accept, check
from project.repro.manifest import sha256_file
from ruamel.yaml import YAML

CLASS, OTHER_CLASS = "cpu-portable/torch-1.2.3", "cuda/0123456789abcdef"
PARTS = {name: name[0] * 64 for name in ("config", "code", "data", "lock", "seed")}
METRICS = {"accuracy": 0.99, "test_loss": 0.05, "steps": 23}
SOURCE = "a result from elsewhere"


LOCK = "schema: '2.0'\nstages:\n  train:\n    outs: [{path: run/model.safetensors}]\n"


@dataclass
class Case:
    """A small project with its locks, and a finished run in it."""

    project: Path

    @property
    def run(self) -> Path:
        return self.project / "run"

    def finished(self, metrics: dict[str, float], environment: str = CLASS, **parts: str) -> None:
        """Write a run's records; other parts make another address."""
        address = {"address": "a" * 64 if not parts else "b" * 64, "parts": PARTS | parts}
        write_json(self.run / "address.json", address)
        write_json(self.run / "environment.json", {"class": environment})
        write_json(self.run / "metrics.json", metrics)

    def check(self) -> tuple[list[bool], str]:
        """What each verdict says, as called from code."""
        verdicts = check(self.run, self.project)
        return [verdict.holds for verdict in verdicts], "\n".join(verdict.sentence for verdict in verdicts)

    def command(self) -> subprocess.CompletedProcess[str]:
        """`repro check`, run in the project."""
        env = {"PYTHONPATH": str(self.project / "src")}
        return python("-m", PACKAGE, "check", self.run, cwd=self.project, env=env)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A run that gave exactly what is expected."""
    case = Case(tmp_path / "project")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "src" / PACKAGE, case.project / "src" / PACKAGE, ignore=ignored)
    case.run.mkdir()
    (case.run / "model.safetensors").write_bytes(b"weights" * 100)
    case.finished(METRICS)
    lock: dict[str, Any] = {
        "tolerance": {"accuracy": 0.02, "test_loss": 0.01},
        "results": [
            {
                "source": SOURCE,
                "address": "a" * 64,
                "parts": PARTS,
                "environment": CLASS,
                "weights": sha256_file(case.run / "model.safetensors"),
                "metrics": METRICS,
            }
        ],
    }
    YAML().dump(lock, case.project / "results.lock")
    (case.project / "dvc.lock").write_text(LOCK)
    git(case.project, "init", "--quiet")
    git(case.project, "add", "dvc.lock")
    git(case.project, "commit", "--quiet", "--message", "start")
    return case


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---- the same address and environment class: bits


def test_equal_bits_are_reproduced(case: Case):
    holds, text = case.check()
    assert holds == [True, True]
    assert f"reproduced bit for bit: {SOURCE} (weights {sha256_file(case.run / 'model.safetensors')})" in text
    assert "the outputs are those of the committed dvc.lock" in text


def test_one_flipped_bit_of_the_weights_differs(case: Case):
    expected = sha256_file(case.run / "model.safetensors")
    flip_one_bit(case.run / "model.safetensors")
    holds, text = case.check()
    assert holds == [False, True]
    assert f"DIFFERS: weights {sha256_file(case.run / 'model.safetensors')}, expected {expected}" in text


# ---- the same address, another class: metrics


@pytest.mark.parametrize(
    ("metrics", "holds"),
    [
        (METRICS, True),
        (METRICS | {"accuracy": 0.971}, True),
        (METRICS | {"accuracy": 0.969}, False),
        (METRICS | {"accuracy": 1.0}, True),
        (METRICS | {"test_loss": 0.0611}, False),
        (METRICS | {"test_loss": float("nan")}, False),
        (METRICS | {"steps": 24}, True),  # no tolerance is given for it
    ],
)
def test_in_another_class_metrics_are_compared(case: Case, metrics: dict[str, float], holds: bool):
    flip_one_bit(case.run / "model.safetensors")
    case.finished(metrics, OTHER_CLASS)
    verdicts, text = case.check()
    assert verdicts == [holds]
    assert text.startswith("metrics within tolerance: " if holds else "METRICS DIFFER: ")
    assert f"accuracy {metrics['accuracy']:.4f} (expected 0.9900 +- 0.02)" in text
    assert f"class {OTHER_CLASS}, the result of class {CLASS}" in text


# ---- another address


@pytest.mark.parametrize("part", PARTS)
def test_unknown_address_names_the_part_that_differs(case: Case, part: str):
    case.finished(METRICS, **{part: "f" * 64})
    holds, text = case.check()
    assert holds == [True, True]
    assert f"content address {'b' * 16} has no expected result in results.lock; another {part} than" in text


def test_all_parts_that_differ_are_named(case: Case):
    case.finished(METRICS, code="f" * 64, seed="f" * 64)
    assert "another code and seed than" in case.check()[1]


def test_empty_results_are_no_fault(case: Case):
    (case.project / "results.lock").write_text("tolerance: {}\nresults: []\n")
    holds, text = case.check()
    assert holds == [True, True] and "has no expected result in results.lock" in text


# ---- dvc.lock


def test_dvc_lock_that_was_rewritten_is_found(case: Case):
    (case.project / "dvc.lock").write_text(LOCK.replace("}", ", md5: 2}"))
    holds, text = case.check()
    assert holds == [True, False] and "the outputs are not those of the committed dvc.lock" in text


def test_layout_of_dvc_lock_does_not_matter(case: Case):
    (case.project / "dvc.lock").write_text("stages: {train: {outs: [{path: run/model.safetensors}]}}\nschema: '2.0'\n")
    assert case.check()[0] == [True, True]


def test_run_elsewhere_has_nothing_to_do_with_dvc_lock(case: Case):
    (case.project / "dvc.lock").write_text(LOCK.replace("run/", ""))
    assert case.check()[0] == [True]


def test_dvc_lock_that_was_never_committed_is_found(case: Case):
    git(case.project, "rm", "--quiet", "--cached", "dvc.lock")
    git(case.project, "commit", "--quiet", "--allow-empty", "--message", "without")
    holds, text = case.check()
    assert holds == [True, False] and "dvc.lock: not committed" in text


# ---- what is missing


@pytest.mark.parametrize("name", ["address.json", "environment.json", "metrics.json", "model.safetensors"])
def test_unfinished_run_is_refused(case: Case, name: str):
    (case.run / name).unlink()
    with pytest.raises(Refused, match="missing; a finished run is wanted") as refused:
        case.check()
    assert str(refused.value).startswith(str(case.run / name))


@pytest.mark.parametrize("name", ["results.lock", "dvc.lock"])
def test_missing_lock_is_refused(case: Case, name: str):
    (case.project / name).unlink()
    with pytest.raises(Refused, match=f"missing. Restore it with: git checkout {name}"):
        case.check()


# ---- the command


def test_command_tells_by_its_exit_code(case: Case):
    done = case.command()
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)

    flip_one_bit(case.run / "model.safetensors")
    done = case.command()
    assert done.returncode == 1 and "DIFFERS: weights" in done.stdout

    shutil.rmtree(case.run)
    done = case.command()
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"{case.run / 'address.json'}: missing" in done.stderr


# ---- accept


def test_accepted_result_is_expected_from_then_on(case: Case):
    before = (PROJECT / "results.lock").read_text()  # with its comments
    (case.project / "results.lock").write_text(before)
    case.finished(METRICS, code="d" * 64)
    assert "no expected result" in case.check()[1]
    told = accept(case.run, "a new network", case.project)
    assert told.startswith(f"results.lock expects weights {sha256_file(case.run / 'model.safetensors')} of content")
    assert (case.project / "results.lock").read_text().startswith(before)
    assert "reproduced bit for bit: a new network" in case.check()[1]
    flip_one_bit(case.run / "model.safetensors")
    assert case.check()[0] == [False, True]


def test_another_class_of_the_same_address_is_accepted_beside_it(case: Case):
    case.finished(METRICS, OTHER_CLASS)
    accept(case.run, "on a GPU", case.project)
    assert "reproduced bit for bit: on a GPU" in case.check()[1]


def test_accepting_what_is_expected_changes_nothing(case: Case):
    before = (case.project / "results.lock").read_text()
    assert "already" in accept(case.run, "again", case.project)
    assert (case.project / "results.lock").read_text() == before


def test_other_bits_than_expected_are_not_accepted(case: Case):
    before = (case.project / "results.lock").read_text()
    flip_one_bit(case.run / "model.safetensors")
    with pytest.raises(Failure, match="this should not happen"):
        accept(case.run, "wishful", case.project)
    assert (case.project / "results.lock").read_text() == before
