"""Planted faults, each of which `samebits diff` must place exactly and give its cause; and runs that are equal."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attempt import crash_after, inside
from clone import copied, verb
from faulty import Faulty
from handmade import HEX, traced, write
from pages import page
from project import data as data_module
from project.config import Config
from project.model import build
from safetensors import safe_open
from safetensors.torch import save_file
from support import OURS, PACKAGE, Trained, python, train_here, trained, training

from samebits.address import manifest
from samebits.address.manifest import sha256_file
from samebits.analysis.diff import Place, causes, first_place, load, report
from samebits.base.files import read_json
from samebits.checkpoint import checkpoint
from samebits.config.settings import Checkpoint
from samebits.core import loop as loop_module
from samebits.core.sampling import Plan
from samebits.core.seeds import derive
from samebits.record import proved, statement
from samebits.record.chain import HAS_WEIGHTS, STEP
from samebits.record.view import RunView

SETTINGS = "tracking.enabled=false", "trace.level=tensor"
TRANSFORMER = "model.name=transformer", "model.depth=1", "parallel.global_batch=256"
Train = Callable[..., Path]


def compare(one: Path, other: Path) -> tuple[Place, list[str]]:
    """Where two runs part, and the causes."""
    sides = load(one), load(other)
    place = first_place(*sides)
    assert place, "taken for equal"
    return place, causes(place, *sides)


@pytest.fixture
def train(config: Config, prepared: Path, tmp_path: Path) -> Train:
    """A function that trains for one epoch in this process, at level `tensor`, and returns the run directory."""

    def train(name: str, workers: int = 0, level: str = "tensor", **update: Any) -> Path:
        settings = inside(config, prepared, workers)
        settings = settings.model_copy(update={"trace": settings.trace.model_copy(update={"level": level}), **update})
        train_here(settings, tmp_path / name)
        return tmp_path / name

    return train


def done(ended: Trained) -> Path:
    """The run directory of a training that came to its end."""
    assert ended.done.returncode == 0, ended.done.stderr
    return ended.out


@pytest.fixture(scope="module")
def clean(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a fault, in a process of its own."""
    return done(trained(tmp_path_factory.mktemp("clean") / "run", prepared, *SETTINGS))


@pytest.fixture(scope="module")
def seeded(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with another seed."""
    return done(trained(tmp_path_factory.mktemp("seeded") / "run", prepared, *SETTINGS, "seed=1"))


def faulty(out: Path, prepared: Path, fault: str, at: int, ranks: int, **env: str) -> Path:
    """A run of several ranks with a fault."""
    ran = Faulty(PACKAGE, out, fault, at, ranks, *SETTINGS, f"data.prepared={prepared}", **env)
    assert ran.code == 0, ran.message
    return ran.out


# ---- equal


def test_equal_runs_are_called_equal(clean: Path, tmp_path: Path):
    again = Path(shutil.copytree(clean, tmp_path / "again"))
    equal, lines = report(load(clean), load(again))
    root = json.loads((clean / "run.json").read_text())["tags"]["repro.trace"]
    weights = sha256_file(clean / "model.safetensors")
    said = f"have equal bits in all 23 steps, trace root {root}, weights {weights} and metrics"
    assert equal and lines == [f"EQUAL: {clean} and {again} {said}"]
    message = verb("diff", clean, again)
    assert (message.exit_code, message.stdout.splitlines()) == (0, lines)


def test_run_that_ends_early_is_equal_as_far_as_it_goes(clean: Path, tmp_path: Path):
    shutil.copytree(clean, tmp_path / "short")
    for name, row in (("steps.bin", 64), ("tensors.bin", (clean / "trace" / "tensors.bin").stat().st_size // 23)):
        os.truncate(tmp_path / "short" / "trace" / name, 9 * row)
    equal, (line,) = report(load(clean), load(tmp_path / "short"))
    assert not equal and line.startswith("UNKNOWN: ") and "short: trace/steps.bin: not as the receipt states" in line
    (tmp_path / "short" / "receipt.json").unlink()  # it has not come to its end
    equal, (line,) = report(load(clean), load(tmp_path / "short"))
    assert not equal and line.startswith("EQUAL SO FAR: ")
    assert line.endswith(f"have equal bits for 9 steps: {clean} has 23, {tmp_path / 'short'} has 9")


def ending(rows: list[tuple[int, ...]], weights: int) -> list[tuple[int, ...]]:
    """Rows whose last one states the weights, as that of a finished run does."""
    step, _, *digests, _ = rows[-1]
    return [*rows[:-1], (step, HAS_WEIGHTS, *digests, weights)]


def test_run_that_begins_another_one_is_called_its_prefix(in_a_folder: None):
    """Such as one of fewer epochs, whose last row alone states weights and which ends with its best ones."""
    write(Path("short"), 6, rows=ending(traced(6), 77), weights="1" * 64)
    write(Path("long"), 12, rows=ending(traced(12), 99))
    equal, lines = report(load(Path("short")), load(Path("long")))
    assert not equal and lines == [
        "EQUAL SO FAR: short and long have equal bits for 6 steps: short has 6, long has 12",
        "short is a prefix of long: it ends after 6 steps",
        f"final weights: {'1' * 64} | {HEX}",
    ]
    message = verb("diff", "long", "short", "--values")
    assert message.exit_code == 1
    assert message.stdout.splitlines()[1:] == [
        "short is a prefix of long: it ends after 6 steps",
        f"final weights: {HEX} | {'1' * 64}",
        "--values: no step differs, so there are no values to compare",
    ]


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        (ending(traced(6, part=5), 77), "step 5, loss"),
        (ending(traced(6, part=5, phase="gradient"), 77), "step 5, gradient"),
        (ending(traced(6), 77), "step 5, weights"),
    ],
)
def test_last_step_of_a_shorter_run_that_differs_is_found(rows: list[tuple[int, ...]], phase: str, in_a_folder: None):
    """Also if only the weights differ, and the longer run states them in this step."""
    write(Path("short"), 6, rows=rows)
    write(Path("long"), 12, rows=[*ending(traced(6), 99), *traced(12)[6:]])
    _, lines = report(load(Path("short")), load(Path("long")))
    assert lines[0] == f"DIFFERENT: short and long first differ at {phase}" and not any(
        "prefix" in line for line in lines
    )


# ---- what the receipts state, and no step of a trace holds


def stating(change: dict[str, Any], folder: Path, traced: bool = True) -> Path:
    """A run made by hand: `change` is what `handmade.write` is given."""
    run = write(folder, **change)
    if not traced:
        shutil.rmtree(run / "trace")
    return run


BEST = {"weights": "1" * 64}
# Runs compared with one of 12 steps: how each is written, whether it has a trace, the verdict, and words of it.
STATED: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "the same": ({}, True, "EQUAL", "equal bits in all 12 steps, trace root "),
    "kept weights": (BEST, True, "DIFFERENT", "equal bits in all 12 steps, trace root "),
    "its receipt alone": (BEST, False, "DIFFERENT", "then other final weights: "),
    "other metrics": ({"metrics": {"accuracy": 0.5}}, True, "DIFFERENT", "other metrics: accuracy: 0.975 |"),
    "no number": ({"metrics": {"accuracy": math.nan}}, True, "DIFFERENT", "other metrics: accuracy: 0.975 | nan"),
    "not finished": ({"status": "RUNNING"}, True, "EQUAL SO FAR", "not finished, so that no receipt"),
    "without a trace": ({"rows": []}, False, "EQUAL", f"have equal weights {HEX} and metrics; no trace of both"),
    "kept, without a trace": (BEST | {"rows": []}, False, "DIFFERENT", "different weights, and no trace of both"),
}


@pytest.mark.parametrize("name", STATED)
def test_what_a_receipt_states_is_compared_and_a_report_says_the_same(name: str, tmp_path: Path, in_a_folder: None):
    change, traced, word, words = STATED[name]
    one, other = write(Path("one")), stating(change, Path("other"), traced)
    equal, lines = report(load(one), load(other))
    assert lines[0].startswith(f"{word}: one and other ") and words in lines[0] and equal == (word == "EQUAL")
    assert f"2 runs: {word}" in (found := page(one, other).text) and lines[0].removeprefix(f"{word}: ") in found


def test_weights_changed_after_the_last_step_are_found_with_their_likely_cause(clean: Path, tmp_path: Path):
    """A loop that keeps the best weights in a variable, and puts them back at its end; one run was resumed."""
    one, other = clean, Path(shutil.copytree(clean, tmp_path / "kept"))
    with safe_open(other / "model.safetensors", "pt") as file:
        kept = {name: file.get_tensor(name) * 2 for name in file.keys()}  # noqa: SIM118
    save_file(kept, other / "model.safetensors")
    assert "kept: model.safetensors: not as the receipt states" in verb("diff", one, other).stdout
    (record := other / "run.json").write_text(json.dumps(read_json(record) | {"resumed": [7]}))
    weights = sha256_file(other / "model.safetensors")
    statement.write(other, statement.statement(OURS, other, weights, load(other).root, proved.none("planted")))
    done = verb("diff", one, other)
    lost = "was resumed after step 7: what its loop kept for itself was lost, if state= does not name it"
    first, second = f"{sha256_file(one / 'model.safetensors')} | {weights}", done.stdout.splitlines()[2]
    assert done.exit_code == 1 and f", then other final weights: {first}\n" in done.stdout
    assert second == f"  {other} {lost}"


def test_folder_without_a_run_or_with_neither_a_trace_nor_a_receipt_is_refused(in_a_folder: None):
    one, bare = write(Path("one")), stating({"status": "RUNNING"}, Path("bare"), traced=False)
    seen = "address.json: missing; a run directory, or a receipt,", "nor a receipt seen: nothing to compare"
    for other, words in zip((".", bare), seen, strict=True):
        message = verb("diff", one, other)
        assert message.exit_code == 2 and words in message.stderr and message.stderr.count("\n") == 1


# ---- what was asked for


def test_another_seed(clean: Path, seeded: Path):
    place, found = compare(clean, seeded)
    assert (place.step, place.phase) == (0, "batch")
    assert found == ["seed: 0 | 1: every random number is derived from the seed"]
    message = verb("diff", clean, seeded)
    assert message.exit_code == 1
    assert message.stdout.splitlines()[0] == f"DIFFERENT: {clean} and {seeded} first differ at step 0, batch"
    assert "seed: 0 | 1" in message.stdout


def steps_of(sample: int, plan: Plan) -> list[int]:
    """The steps of one epoch that a sample comes in."""
    places = product(range(plan.steps(1)), range(plan.micro_batches))
    return [step for step, micro_batch in places if (0, sample) in plan.keys(step, micro_batch)]


def test_one_sample_altered(clean: Path, train: Train, config: Config, prepared: Path, tmp_path: Path):
    shutil.copytree(prepared, tmp_path / "data")
    images = np.load(tmp_path / "data" / "train-images.npy")
    images[700, 3, 3] += 1
    np.save(tmp_path / "data" / "train-images.npy", images)
    manifest.write(tmp_path / "data", requested=config.data)
    altered = config.data.model_copy(update={"prepared": str(tmp_path / "data")})
    place, found = compare(clean, train("other", data=altered))
    plan = Plan(len(images), config.parallel.global_batch, config.parallel.micro_batches, config.seed)
    assert steps_of(700, plan) == [place.step] and place.phase == "batch"
    assert len(found) == 1 and found[0].startswith("data.train-images.npy: ")
    assert found[0].endswith(": the batch is made of other data")


def test_changed_optimizer_epsilon(clean: Path, prepared: Path, tmp_path: Path):
    other = tmp_path / "other"
    copied(other, ("src", "vendor", "requirements"), ("params.yaml", "pyproject.toml"))
    source = other / "src" / PACKAGE / "train.py"
    source.write_text(source.read_text().replace("fused=True)", "fused=True, eps=1e-6)"))
    place, found = compare(clean, faulty(tmp_path, prepared, "code", 0, 1, OTHER=str(other)))
    assert (place.step, place.phase) == (0, "weights") and place.tensors
    assert len(found) == 1 and found[0].startswith("code.train.py: ")
    assert found[0].endswith(": this code holds the optimizer and its settings")


# ---- what it ran on


TWO = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
LEFT_OFF: dict[str, tuple[dict[str, str | None], int, str, str]] = {  # among so many causes: how it begins, and ends
    "MKL_CBWR": ({"MKL_CBWR": None}, 1, "3 | ", ": MKL takes another path for each maker and model of CPU"),
    "OMP_NUM_THREADS": (TWO, 2, "1 | 2: the thread count decides", ""),
}


@pytest.fixture(scope="module")
def transformer(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the transformer under all flags."""
    return done(trained(tmp_path_factory.mktemp("transformer") / "run", prepared, *SETTINGS, *TRANSFORMER))


@pytest.mark.long
@pytest.mark.parametrize("flag", LEFT_OFF)
def test_switch_left_off(flag: str, transformer: Path, prepared: Path, tmp_path: Path):
    env, first, values, why = LEFT_OFF[flag]
    relax = f"determinism.relax=[{','.join(env)}]"
    words = training(tmp_path / "off", prepared, *SETTINGS, *TRANSFORMER, relax)
    assert python("-m", "samebits", "train", *words, env=env).returncode == 0
    place, found = compare(transformer, tmp_path / "off")
    assert place.step == 0 and place.phase in ("output", "gradient") and place.tensors
    assert any(text.startswith(f"flags.{flag}: {values}") and text.endswith(why) for text in found[:first])


# ---- what nobody recorded


def test_augmentation_with_an_unseeded_generator(train: Train, monkeypatch: pytest.MonkeyPatch):
    item = data_module.Digits.__getitem__

    def noisy(self: data_module.Digits, index: int) -> Any:
        image, label = item(self, index)
        return image + (os.urandom(1)[0] / 2550 if self.shift and index == 321 else 0), label

    monkeypatch.setattr(data_module.Digits, "__getitem__", noisy)
    place, found = compare(train("one"), train("other"))
    assert steps_of(321, Plan(1438, 64, 8, 0)) == [place.step] and place.phase == "batch"
    assert len(found) == 1 and "randomness that nobody seeds" in found[0]


def test_dropout_not_reseeded(clean: Path, train: Train, config: Config, monkeypatch: pytest.MonkeyPatch):
    left_out, seed = derive(config.seed, "micro-batch", 5, 3), loop_module.seed_everything

    def forgetful(number: int) -> None:
        if number != left_out:
            seed(number)

    monkeypatch.setattr(loop_module, "seed_everything", forgetful)
    place, found = compare(clean, train("other", workers=1))
    assert (place.step, place.phase) == (5, "output")
    assert isinstance(build(config).get_submodule(place.tensors[0]), torch.nn.Dropout)
    assert len(found) == 1 and "not seeded per micro-batch" in found[0]


def test_bit_flipped_in_a_gradient_of_one_rank(clean: Path, prepared: Path, tmp_path: Path):
    # the 18th gradient of rank 1, which runs micro-batches 4 to 7: step 4
    place, found = compare(clean, faulty(tmp_path, prepared, "gradient", 1, 2))
    assert place == Place(4, "gradient", ("head.weight",), place.of)
    assert len(found) == 1 and "integrity.recompute_every finds hardware" in found[0]


def test_resume_from_a_wrong_step(clean: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    newest = checkpoint.newest

    def one_late(*arguments: Any) -> Any:
        snapshot = newest(*arguments)
        return dataclasses.replace(snapshot, step=snapshot.step + 1)

    every = {"checkpoint": Checkpoint(every=4, keep=1, on_error="stop")}
    with crash_after(12):
        train("other", level="step", **every)
    other = tmp_path / "other"
    record = other / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"status": "RUNNING"}))
    os.truncate(other / "trace" / "steps.bin", 13 * 64)  # else the run itself finds that its steps differ
    rows = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(rows[:13]))
    monkeypatch.setattr(checkpoint, "newest", one_late)
    place, found = compare(clean, train("other", level="step", **every))
    assert (place.step, place.phase) == (13, "loss")
    assert found[0].endswith("other was resumed just before step 13: it went on from another state")


def handmade(name: str, **parts: Any) -> RunView:
    """A run that lies nowhere, with these parts."""
    run = RunView(Path("nowhere"), name)
    vars(run).update(parts)
    return run


def test_gradients_are_named_from_the_one_that_the_backward_pass_comes_by_first():
    columns = "gradient first", "gradient last", "weights first"
    fields = np.dtype([*((name, "<u8") for name in columns), ("link", "V24")])
    steps = np.zeros(1, np.dtype([*((name, STEP[name]) for name in STEP.names or ()), ("link", "V24")]))

    def run(name: str, number: int) -> RunView:
        row, tensors = steps.copy(), np.zeros(1, fields)
        row["gradient"] = number
        for column in columns:
            tensors[column] = number
        for chain in (row, tensors):
            chain["link"] = bytes([number]) * 24
        return handmade(name, steps=row, tensors=tensors, columns=columns)

    assert first_place(run("one", 1), run("other", 2)) == Place(0, "gradient", ("last", "first"), 2)


# ---- receipts


def test_receipts_are_compared_by_their_roots(clean: Path, seeded: Path):
    one, another = clean / "receipt.json", seeded / "receipt.json"
    root = json.loads((clean / "run.json").read_text())["tags"]["repro.trace"]
    equal, lines = report(load(one), load(clean))
    assert equal and f"in all 23 steps, trace root {root}, weights " in lines[0]
    equal, lines = report(load(one), load(another))
    assert not equal and lines[0].startswith(f"DIFFERENT: {one} and {another} have different trace roots: {root} | ")
    assert "  seed: 0 | 1: every random number is derived from the seed" in lines


# ---- ranking


def side(name: str, **fields: Any) -> RunView:
    """A run with these fields in its content address."""
    return handmade(name, addressed=fields)


LIKELIEST = {
    "batch": "code.data.py",
    "loss": "code.model.py",
    "gradient": "core.accumulate.py",
    "weights": "config.train.clip_norm",
}


@pytest.mark.parametrize("phase", LIKELIEST)
def test_causes_come_likeliest_first_for_the_phase(phase: str):
    fields = (*LIKELIEST.values(), "core.place.py")
    one, other = ({field: f"{field}{which}" for field in fields} for which in (1, 2))
    found = causes(Place(3, phase, (), 0), side("one", **one), side("other", **other))
    assert len(found) == len(fields) and found[0].startswith(f"{LIKELIEST[phase]}: ")
