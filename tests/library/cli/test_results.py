"""`samebits check`: whether a run gave what the locks expect, in words and in the exit code."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from click.testing import Result
from clone import copied, git, project_in, verb
from project.config import Config
from ruamel.yaml import YAML
from support import PACKAGE, PROJECT, as_earlier_release, python

from samebits.address import manifest
from samebits.address.address import content_address, digest
from samebits.address.manifest import sha256_file
from samebits.analysis.results import accept, check
from samebits.base.files import read_json, write_json
from samebits.base.project import Project
from samebits.config.params import load
from samebits.core import ARITHMETIC
from samebits.core.arithmetic import description
from samebits.core.errors import RunError, UserError
from samebits.record import proved, statement
from samebits.record.view import LATER

CLASS, OTHER_CLASS = "cpu-portable/torch-1.2.3", f"cuda/{digest({'device': 'cuda'})[:16]}"
LEFT_OFF = {"device": "cpu", "relaxed": ["PYTHONHASHSEED"]}
RELAXED = f"relaxed/{digest(LEFT_OFF)[:16]}"
MACHINES: dict[str, dict[str, Any]] = {
    CLASS: {"device": "cpu", "threads": 1, "cpu": {"arithmetic": "of 1.2.3"}, "torch": {"version": "1.2.3"}},
    OTHER_CLASS: {"device": "cuda"},
    RELAXED: LEFT_OFF,
}
PARTS = ("config", "code", "data", "lock", "seed")
METRICS = {"accuracy": 0.99, "test_loss": 0.05, "steps": 23}
SOURCE = "a result from elsewhere"


LOCK = """schema: '2.0'
stages:
  train:
    outs: [{path: run/model.safetensors, hash: md5, md5: %s}]
  evaluate:
    deps: [{path: run/model.safetensors, hash: md5, md5: %s}]
    outs: [{path: run/evaluation.json, hash: md5, md5: %s}]
"""


@dataclass
class Case:
    """A project with its locks and its data, a finished run in it, and what params.yaml asks for."""

    project: Project
    config: Config

    @property
    def run(self) -> Path:
        return self.project.root / "run"

    @property
    def address(self) -> dict[str, Any]:
        """What the run's address.json holds."""
        return read_json(self.run / "address.json")

    def finished(self, metrics: dict[str, float], environment: str = CLASS, lacks: Iterable[str] = ()) -> None:
        """Write the records of a run of the project as it stands, by a release whose config lacks keys."""
        data = manifest.read(Path(self.config.data.prepared))
        address = content_address(self.project, self.config, data)
        preimage = MACHINES[environment]
        stated = {"class": environment, "environment": digest(preimage), "preimage": preimage, "informational": {}}
        facts = {
            "id": "1",
            "status": "FINISHED",
            "started": 0,
            "config": {key: value for key, value in self.config.flat().items() if key not in lacks},
            "code": {"commit": None, "patch": None},
            "tags": {"repro.address": address.digest},
            "tracking": self.config.tracking.model_dump(),
            "dataset": {"name": "any", "digest": address.parts["data"]},
        }
        records = {"address": address.record(), "environment": stated, "metrics": metrics, "run": facts}
        for name, record in records.items():
            write_json(self.run / f"{name}.json", record)
        weights = sha256_file(self.run / "model.safetensors")
        statement.write(self.run, statement.statement(self.project, self.run, weights, None, proved.none("planted")))

    def by_dvc(self) -> str:
        """Write and commit dvc.lock as DVC would after these weights and their evaluation; returns it."""
        write_json(self.run / "evaluation.json", {"accuracy": 0.99})
        names = "model.safetensors", "model.safetensors", "evaluation.json"
        lock = LOCK % tuple(hashlib.md5((self.run / name).read_bytes()).hexdigest() for name in names)
        (self.project.root / "dvc.lock").write_text(lock)
        git(self.project.root, "add", "dvc.lock")
        git(self.project.root, "commit", "--quiet", "--allow-empty", "--message", "made")
        return lock

    def expected(self, *parts: str) -> None:
        """Write a results.lock that expects this run; with `parts`, of an address in which these are others."""
        there = self.address
        row = {
            "source": SOURCE,
            "address": "b" * 64 if parts else there["address"],
            "parts": there["parts"] | dict.fromkeys(parts, "f" * 64),
            "environment": CLASS,
            "weights": sha256_file(self.run / "model.safetensors"),
            "metrics": METRICS,
        }
        lock = {"tolerance": {"accuracy": 0.02, "test_loss": 0.01}, "results": [row]}
        YAML().dump(lock, self.project.root / "results.lock")

    def check(self, config: Config | None = None) -> tuple[list[bool], str]:
        """What each verdict says, as called from code."""
        verdicts = check(self.project, config or self.config, self.run)
        return [verdict.holds for verdict in verdicts], "\n".join(verdict.sentence for verdict in verdicts)

    def command(self, *arguments: str) -> Result:
        """`samebits check`, run in this process, which is in the project."""
        return verb("check", self.run, *arguments, project=self.project)


@pytest.fixture
def case(config: Config, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A run that gave exactly what is expected."""
    root = tmp_path / "project"
    copied(root, (f"src/{PACKAGE}", "vendor", "requirements"), ["params.yaml", "pyproject.toml"])
    shutil.copytree(prepared, root / config.data.prepared)
    case = Case(project_in(root), config)
    monkeypatch.chdir(root)
    case.run.mkdir()
    (case.run / "model.safetensors").write_bytes(b"weights" * 100)
    case.finished(METRICS)
    case.expected()
    git(root, "init", "--quiet")
    case.by_dvc()
    return case


def requested(*overrides: str) -> Config:
    """The project's params.yaml with these values."""
    return load(Config, PROJECT / "params.yaml", overrides)


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


def require_not_accepted(case: Case, message: str) -> None:
    before = (case.project.root / "results.lock").read_text()
    with pytest.raises(RunError, match=message):
        accept(case.project, case.run, "wishful")
    assert (case.project.root / "results.lock").read_text() == before


def test_one_flipped_bit_of_the_weights_differs(case: Case):
    expected = sha256_file(case.run / "model.safetensors")
    flip_one_bit(case.run / "model.safetensors")
    case.finished(METRICS)
    case.by_dvc()
    holds, text = case.check()
    assert holds == [False, True]
    assert f"DIFFERS: weights {sha256_file(case.run / 'model.safetensors')}, expected {expected}" in text
    require_not_accepted(case, "this breaks the contract")


@pytest.mark.parametrize("metrics", [METRICS | {"accuracy": 0.9999}, METRICS | {"f1": 0.5}, {"accuracy": 0.99}])
def test_other_metrics_of_the_same_weights_differ(case: Case, metrics: dict[str, float]):
    """An evaluation that does not repeat, or an edited receipt with a metrics.json to match."""
    case.finished(metrics)
    holds, text = case.check()
    assert holds == [False, True] and text.startswith("DIFFERS: ") and "this breaks the contract" in text
    require_not_accepted(case, "expects another outcome of this content address")


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
    case.by_dvc()
    case.finished(metrics, OTHER_CLASS)
    verdicts, text = case.check()
    assert verdicts == [holds]
    assert text.startswith("metrics within tolerance: " if holds else "METRICS DIFFER: ")
    assert f"accuracy {metrics['accuracy']:.4f} (expected 0.9900 +- 0.02)" in text
    assert f"class {OTHER_CLASS}, the result of class {CLASS}" in text


def test_run_with_a_switch_off_is_compared_by_its_metrics(case: Case):
    """Its class promises no bits, so that other ones break no contract."""
    case.config = requested("determinism.relax=[PYTHONHASHSEED]")
    case.finished(METRICS, RELAXED)
    accept(case.project, case.run, "relaxed")
    flip_one_bit(case.run / "model.safetensors")
    case.finished(METRICS, RELAXED)
    case.by_dvc()
    holds, text = case.check()
    assert holds == [True] and text.startswith("metrics within tolerance: ") and f"class {RELAXED}, the resu" in text


# ---- another address than any in results.lock


@pytest.mark.parametrize("parts", [*PARTS, "code and seed"])
def test_unknown_address_names_the_parts_that_differ(case: Case, parts: str):
    case.expected(*parts.split(" and "))
    holds, text = case.check()
    assert holds == [True, True]
    address = case.address["address"]
    assert f"content address {address[:16]} has no expected result in results.lock; another {parts} than" in text
    assert ". To expect this result: samebits accept " in text


# ---- another address than the project has now: whatever the locks say, the run is stale


def another_sample(case: Case) -> None:
    folder = Path(case.config.data.prepared)
    content = (folder / "test-images.npy").read_bytes()
    (folder / "test-images.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    manifest.write(folder, requested=case.config.data)


def another_pin(case: Case) -> None:
    for path in (case.project.root / "requirements").glob("train-*.txt"):
        path.write_text(re.sub(r"(?m)^sympy==\S+", "sympy==1.0", path.read_text()))


def a_remark(case: Case, name: str = "model.py") -> None:
    """A line more in a file of the package, or a new file."""
    with case.project.file(name).open("a") as file:
        file.write("# a remark\n")


CHANGES = {
    "data.test-images.npy": another_sample,
    "lock.sympy": another_pin,
    "core.step.py": partial(a_remark, name="samebits/core/step.py"),
    "code.model.py": a_remark,
    "code.words.txt": partial(a_remark, name="words.txt"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_run_of_a_project_that_changed_since_is_stale(case: Case, field: str):
    change: Callable[[Case], None] = CHANGES[field]
    change(case)
    holds, text = case.check()
    assert holds == [False] and len(text.splitlines()) == 1
    assert text.startswith(f"STALE: {case.run} is not a run of the project as it stands now ({field}: ")
    assert text.count(" then, ") == 1 and "Train again: make repro" in text
    case.finished(METRICS)
    assert case.check()[0] == [True, True]  # trained again


def test_run_of_an_earlier_release_is_stale_with_the_way_to_repeat_it(case: Case):
    """Its content address states the files of core, and `parallel.reduce`."""
    path = case.run / "receipt.json"
    written = json.loads(path.read_text())
    predicate = written["predicate"]
    record = as_earlier_release({name: predicate.pop(name) for name in ("address", "parts", "preimage", "core_files")})
    predicate |= record
    predicate["config"] |= {"parallel.reduce": "tree"}
    path.write_bytes(rfc8785.dumps(written))
    write_json(case.run / "address.json", record)
    facts = read_json(case.run / "run.json")
    write_json(case.run / "run.json", facts | {"config": predicate["config"]})
    holds, text = case.check()
    core = description(record["preimage"]["core"])
    assert holds == [False] and text.startswith(f"STALE: {case.run} is not a run of the project as it stands now (")
    assert f"now (core: {core} then, arithmetic {ARITHMETIC} now). Train again: make repro" in text
    assert f"Or repeat the old run with the library of its commit: samebits replay {path}. If" in text


SIX = "clip_norm=2.0 train.warmup=0.5 train.decay=0.5 train.epochs=7 train.weight_decay=0.5 train.learning_rate=1.0"
KEYS = {
    "train.clip_norm=2.0": "(config.train.clip_norm: 1 then, 2 now)",
    "determinism.cpu=native": "(determinism.cpu: ",  # the content address lacks it, but DVC would train again
    "determinism.relax=[tf32]": "(determinism.relax: ",
    f"train.{SIX}": " and 2 more)",
}


@pytest.mark.parametrize("keys", KEYS)
def test_another_value_of_a_key_makes_a_run_stale_and_is_named(case: Case, keys: str):
    holds, text = case.check(requested(*keys.split()))
    assert holds == [False] and KEYS[keys] in text and text.count(" then, ") == min(4, len(keys.split()))


def test_key_that_the_record_of_an_earlier_release_lacks_has_the_value_that_its_runs_had(case: Case):
    case.finished(METRICS, lacks=LATER)
    assert case.check()[0] == [True, True]
    holds, text = case.check(requested("environment.variables=[SIZE]"))
    assert holds == [False] and "(environment.variables: [] then, ['SIZE'] now)" in text


def test_neutral_key_makes_no_run_stale(case: Case):
    assert case.check(requested("loader.workers=2"))[0] == [True, True]


# ---- dvc.lock


WRITTEN: dict[str, tuple[Callable[[str], str], list[bool]]] = {
    "with other digests": (lambda lock: lock.replace("md5: ", "md5: 2"), [True, False]),
    "in another layout": (lambda lock: "\n".join([*lock.splitlines()[1:], lock.splitlines()[0]]), [True, True]),
    "of another run": (lambda lock: lock.replace("run/", ""), [True]),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_dvc_lock_that_was_rewritten_is_found(case: Case, how: str):
    rewritten, holds = WRITTEN[how]
    (case.project.root / "dvc.lock").write_text(rewritten(case.by_dvc()))
    seen, text = case.check()
    assert seen == holds and ("the outputs are not those of the committed dvc.lock" in text) == (False in holds)


def test_dvc_lock_that_was_never_committed_is_found(case: Case):
    git(case.project.root, "rm", "--quiet", "--cached", "dvc.lock")
    git(case.project.root, "commit", "--quiet", "--allow-empty", "--message", "without")
    holds, text = case.check()
    assert holds == [True, False] and "dvc.lock: not committed" in text


def test_outputs_that_were_made_without_dvc_are_found(case: Case):
    """Another learning rate, trained by hand into the folder; then its evaluation, by hand, too."""
    flip_one_bit(case.run / "model.safetensors")
    case.finished(METRICS)
    case.expected("config")
    holds, text = case.check()
    _, stale, locked = text.splitlines()
    assert holds == [True, False, False] and stale.startswith("STALE: run/evaluation.json: left from an older run, ")
    assert locked.startswith("the outputs are not those of the committed dvc.lock: run/model.safetensors: missing, ")
    write_json(case.run / "evaluation.json", {"accuracy": 0.5})
    holds, text = case.check()
    assert holds == [True, False] and "dvc.lock: run/model.safetensors, run/evaluation.json: missing, " in text
    case.by_dvc()  # `make repro`
    assert case.check()[0] == [True, True]


def test_output_that_is_not_there_or_has_no_md5_is_named(case: Case):
    lock = case.by_dvc()
    (case.run / "evaluation.json").unlink()
    holds, text = case.check()
    assert holds == [True, False] and "committed dvc.lock: run/evaluation.json: missing, " in text
    for word in ("add", "commit"):
        (case.project.root / "dvc.lock").write_text(lock.replace("evaluation.json, hash: md5", "evaluation.json"))
        git(case.project.root, word, *(["dvc.lock"] if word == "add" else ["--quiet", "--message", "older"]))
    holds, text = case.check()
    assert holds == [True, True] and "dvc.lock, but for run/evaluation.json, of which it has no MD5 to" in text


@pytest.mark.parametrize(("weights", "stale"), [("0" * 64, True), ("", False), (0.25, False)])
def test_evaluation_of_other_weights_is_stale_without_dvc(case: Case, weights: Any, stale: bool):
    """It states the digest of the weights that were loaded; a metric of that name states none."""
    (case.project.root / "dvc.lock").write_text(case.by_dvc().replace("run/", ""))
    write_json(case.run / "evaluation.json", {"weights": weights or sha256_file(case.run / "model.safetensors")})
    holds, text = case.check()
    assert holds == [True, False][: 1 + stale] and stale == (f"STALE: {case.run / 'evaluation.json'}: left " in text)


# ---- files of another run than the one whose receipt lies beside them: DVC and git bring back single files


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def hashed_anew(path: Path) -> None:
    """A forged address with a digest to match."""
    preimage = read_json(path)["preimage"] | {"seed": 1}
    parts = {name: digest(part) for name, part in preimage.items()}
    write_json(path, {"address": digest(preimage), "parts": parts, "preimage": preimage})


FOREIGN = [
    ("model.safetensors", flip_one_bit),
    ("model.safetensors", Path.unlink),
    ("metrics.json", lambda path: write_json(path, METRICS | {"accuracy": 1.0})),
    ("metrics.json", lambda path: write_json(path, {"accuracy": 0.99})),
    ("metrics.json", lambda path: write_json(path, [])),
    ("metrics.json", Path.unlink),
    ("address.json", lambda path: write_json(path, read_json(path) | {"address": "0" * 64})),
    ("address.json", hashed_anew),
    ("address.json", cut_short),
    ("address.json", Path.unlink),
]


@pytest.mark.parametrize(("name", "change"), FOREIGN)
def test_file_of_another_run_is_named_and_not_accepted(case: Case, name: str, change: Callable[[Path], None]):
    change(case.run / name)
    holds, text = case.check()
    assert holds == [False] and text.startswith(f"FOREIGN: {name} in {case.run}: not of the run whose receipt.json")
    require_not_accepted(case, f"FOREIGN: {name}")


def test_all_foreign_files_are_named_and_staleness_too(case: Case):
    """As after going back to an older commit, whose weights and metrics DVC and git have brought back."""
    flip_one_bit(case.run / "model.safetensors")
    write_json(case.run / "metrics.json", METRICS | {"accuracy": 0.5})
    a_remark(case)
    holds, text = case.check()
    foreign, stale = text.splitlines()
    assert holds == [False, False] and stale.startswith("STALE: ")
    assert foreign.startswith("FOREIGN: model.safetensors, metrics.json in ")


# ---- what is missing or altered

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "run/receipt.json": (Path.unlink, r"run/receipt\.json: missing; the receipt of a finished run is wanted"),
    "./run/receipt.json": (cut_short, "altered"),
    "results.lock": (Path.unlink, r"missing\. Restore it with: git checkout results\.lock"),
    "dvc.lock": (Path.unlink, r"missing\. Restore it with: git checkout dvc\.lock"),
    "data/prepared/test-images.npy": (flip_one_bit, r"test-images\.npy: SHA-256 .* seen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_missing_or_altered_file_is_refused(case: Case, name: str):
    change, message = REFUSED[name]
    change(case.project.root / name)
    with pytest.raises(RunError, match=message):
        case.check()


@pytest.mark.parametrize("text", ["tolerance: {}\nresults: []\n", "tolerance:\nresults:\n"])
@pytest.mark.parametrize("loss", [0.05, float("nan")])
def test_result_is_accepted_where_none_is_yet(case: Case, text: str, loss: float):
    case.finished(METRICS | {"test_loss": loss})
    (case.project.root / "results.lock").write_text(text)
    holds, said = case.check()
    assert holds == [True, True] and "has no expected result in results.lock" in said
    accept(case.project, case.run, "the first")
    holds, said = case.check()
    assert holds == [True, True] and "reproduced bit for bit: the first" in said


# ---- the tolerance

TOLERANCES = {
    "{accuracy: 0.02}": "tolerance is of accuracy; the run has accuracy, test_loss",
    "{accuracy: 0.02, test_loss: 0.01, f1: 0.1}": "tolerance is of accuracy, f1, test_loss; the run has ",
    "{}": "tolerance is of none; the run has accuracy, test_loss, the expected result accuracy, test_loss. N",
    "": "tolerance is of none; ",
    "{accuracy: 2%, test_loss: 0.01}": "tolerance of accuracy: '2%' seen, a number wanted",
}


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_tolerance_of_other_metrics_is_refused_in_one_line(case: Case, tolerance: str):
    case.finished(METRICS, OTHER_CLASS)
    path = case.project.root / "results.lock"
    lock = YAML(typ="safe").load(path.read_text()) | {"tolerance": YAML(typ="safe").load(tolerance)}
    YAML().dump(lock, path)
    done = case.command()
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("results.lock: ") and TOLERANCES[tolerance] in done.stderr


@pytest.mark.parametrize("metrics", [{"accuracy": 0.99}, METRICS | {"f1": 0.5}])
def test_run_of_other_metrics_than_the_expected_one_is_refused(case: Case, metrics: dict[str, float]):
    case.finished(metrics, OTHER_CLASS)
    with pytest.raises(UserError, match="metrics cannot be compared"):
        case.check()


# ---- the command


def test_command_tells_by_its_exit_code(case: Case):
    done = python(
        "-m", "samebits", "check", case.run, env={"PYTHONPATH": os.pathsep.join(case.project.path)}, cwd=Path.cwd()
    )
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)
    flip_one_bit(case.run / "model.safetensors")
    case.finished(METRICS)
    done = case.command()
    assert done.exit_code == 1 and "DIFFERS: weights" in done.stdout and len(done.stdout.splitlines()) == 3
    done = case.command("--set", "seed=1")
    assert done.exit_code == 1 and done.stdout.startswith("STALE: ") and "(seed: 0 then, 1 now)" in done.stdout
    shutil.rmtree(case.run)
    done = case.command()
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith(f"{case.run}: missing; the receipt of a finished run is wanted. Train again: ")


# ---- accept


def test_accepted_result_is_expected_from_then_on(case: Case):
    before = (PROJECT / "results.lock").read_text()  # with its comments
    (case.project.root / "results.lock").write_text(before)
    a_remark(case)  # no released result is of this code
    case.finished(METRICS)
    assert "no expected result" in case.check()[1]
    message = accept(case.project, case.run, "a new network")
    assert message.startswith(f"results.lock expects weights {sha256_file(case.run / 'model.safetensors')} of content")
    assert (case.project.root / "results.lock").read_text().startswith(before)
    assert "reproduced bit for bit: a new network" in case.check()[1]
    flip_one_bit(case.run / "model.safetensors")
    case.finished(METRICS)
    assert case.check()[0] == [False, False, False]


def test_another_class_of_the_same_address_is_accepted_beside_it_and_once(case: Case):
    case.finished(METRICS, OTHER_CLASS)
    accept(case.project, case.run, "on a GPU")
    assert "reproduced bit for bit: on a GPU" in case.check()[1]
    before = (case.project.root / "results.lock").read_text()
    assert "already" in accept(case.project, case.run, "again")
    assert (case.project.root / "results.lock").read_text() == before
