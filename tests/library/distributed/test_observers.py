"""Whoever watches a training cannot change a bit of it: a planted observer is harmless, or reported by name."""

import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attempt import inside, result
from faulty import Faulty
from loops import Numbers, Parts, loss_of
from project.config import Config
from support import CORE, LIBRARY, PACKAGE, source
from support import OURS as PROJECT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebits import front
from samebits.core import errors
from samebits.core import loop as loop_module
from samebits.core.loop import EVENTS, Loop
from samebits.core.observer import Ballot, Observer, View
from samebits.run import ADDED, Added, Run

Does = Callable[[View], Any]
Train = Callable[..., dict[str, Any]]


def planted(does: Does, when: str, is_vital: bool = True) -> Observer:
    """An observer that does this in one event, or in all."""

    class Planted(Observer):
        name, vital = "planted", is_vital

    def heard(event: str) -> Any:
        def method(self: Observer, view: View, *counted: Any) -> Any:
            does(view)
            return Ballot() if event == "ballot" else None

        return method

    for event in EVENTS if when == "all" else [when]:
        setattr(Planted, event, heard(event))
    return Planted()


class Drawing(Numbers):
    """Samples that draw from all generators."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.rand(4) + random.random() + np.random.rand(), "y": torch.full((1,), index / 100)}


def looped(run: Run) -> None:
    """A loop that draws wherever it can, and after its end."""
    parts = Parts(run)
    for step in run.steps(parts.model, torch.optim.AdamW(parts.model.parameters(), fused=True), Drawing(), steps=3):
        step.log(before=drawn())
        for batch in step:
            step.backward(loss_of(parts.model, batch))
        run._loop.optimizers.all[0].step()  # type: ignore[union-attr]
        step.log(after=drawn())
    run.finish(end=drawn())


def drawn() -> float:
    return float(torch.rand(())) + random.random() + float(np.random.rand())


@pytest.fixture(autouse=True)
def _stages_run_here(as_a_stage: None):
    """In this process, which has loaded more than they may."""


@pytest.fixture
def train(config: Config, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """A function that trains with a planted observer, and returns what must not depend on it, and what was told."""

    def train(*observers: Observer, code: int = 0, show: Any = None) -> dict[str, Any]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))

        def stage(config: Config, out: Path) -> None:
            with Run(PROJECT, config, out) as run:
                if show:
                    run.on_log(show)
                looped(run)

        token, ended = ADDED.set(Added(observers)), 0
        try:
            front.call(PROJECT, stage, inside(config, prepared, 0), out)
        except SystemExit as left:
            ended = left.code
        finally:
            ADDED.reset(token)
        message = capsys.readouterr().err
        assert ended == code, message
        return {"told": message} | (result(out) if not code else {})

    return train


def draw(view: View) -> None:
    drawn()


def sleep(view: View) -> None:
    time.sleep(0.01)


def fail(view: View) -> None:
    raise ValueError("planted")


@pytest.fixture
def control(train: Train) -> dict[str, Any]:
    made = train()
    assert made["told"] == ""
    return made


@pytest.mark.parametrize("does", [draw, sleep])
def test_observer_that_draws_or_sleeps_changes_no_bit(does: Does, train: Train, control: dict[str, Any]):
    assert train(planted(does, "all")) == control


@pytest.mark.parametrize("event", ["begin_step", "gradients", "end_step"])
def test_what_an_observer_draws_would_change_bits(event: str, train: Train, control: dict[str, Any], monkeypatch: Any):
    seed = Loop.seed

    def micro_batches_only(loop: Loop, step: int, micro_batch: int, number: int = 0) -> None:
        if micro_batch < loop.plan.micro_batches:
            seed(loop, step, micro_batch, number)

    monkeypatch.setattr(Loop, "seed", micro_batches_only)
    monkeypatch.setattr(loop_module, "preserved", nullcontext)
    assert train(planted(draw, event))["rows"] != train()["rows"]


@pytest.mark.parametrize("event", EVENTS)
def test_observer_that_raises_is_reported_once_and_left_out(event: str, train: Train, control: dict[str, Any]):
    made = train(planted(fail, event, is_vital=False))
    assert made.pop("told") == f"step 0: planted raised in {event}, and is left out: ValueError: planted\n"
    assert made == {name: value for name, value in control.items() if name != "told"}


@pytest.mark.parametrize("event", EVENTS)
def test_vital_observer_that_raises_ends_the_run(event: str, train: Train):
    def refuse(view: View) -> None:
        raise errors.UserError("planted: no")

    assert train(planted(refuse, event), code=2)["told"] == "planted: no\n"
    with pytest.raises(ValueError, match="planted"):
        train(planted(fail, event))


def weight(view: View) -> None:
    next(iter(view.weights().values())).mul_(2)  # type: ignore[union-attr]


def gradient(view: View) -> None:
    next(iter(view.gradients().values())).add_(1)  # type: ignore[union-attr]


def buffer(view: View) -> None:
    next(iter(view.buffers().values())).add_(1)


def state(view: View) -> None:
    view.state()["0.weight"][-1].add_(1)  # type: ignore[union-attr]


def batch(view: View) -> None:
    view.batch[0].zero_()


def dropped_gradient(view: View) -> None:
    view._loop.model[0].weight.grad = None  # type: ignore[index]


WRITES = [
    *((weight, event) for event in EVENTS),
    *((buffer, event) for event in EVENTS),
    (gradient, "gradients"),
    (dropped_gradient, "gradients"),
    (state, "end_step"),
    (batch, "batch"),
]


@pytest.mark.parametrize(("writes", "event"), WRITES)
def test_observer_that_writes_is_reported_by_name(writes: Does, event: str, train: Train):
    for is_vital in (True, False):
        message = train(planted(writes, event, is_vital), code=4)["told"]
        assert message.startswith(f"step 0: planted wrote in {event} into weights, gradients, buffers, the batch or ")


def test_observer_that_writes_later_is_reported_among_others(train: Train):
    def late(view: View) -> None:
        if view.step == 1:
            weight(view)

    message = train(planted(late, "ballot"), code=4)["told"]
    assert message.startswith("step 1: updates or portability or ")
    assert " or planted wrote in ballot into weights" in message


@pytest.mark.parametrize(("writes", "event"), [(weight, "end_step"), (gradient, "gradients"), (batch, "batch")])
def test_what_an_observer_writes_would_change_bits(
    writes: Does, event: str, train: Train, control: dict[str, Any], monkeypatch: Any
):
    monkeypatch.setattr(Loop, "_versions", lambda *given: None)
    assert train(planted(writes, event))["weights"] != control["weights"]


@pytest.mark.parametrize("event", ["gradients", "end_step"])
def test_vital_observer_of_one_rank_ends_all_alike(event: str, tmp_path: Path, prepared: Path):
    sets = "tracking.enabled=false", f"data.prepared={prepared}", "parallel.timeout_seconds=60"
    ran = Faulty(PACKAGE, tmp_path / "run", "observer", 1, 2, *sets, OTHER=event)
    assert ran.codes[1] == "2", ran.message
    if event == "end_step":  # after the count: this rank ends at once, and the other one misses it
        assert "rank 1: planted: no" in ran.message
    else:
        assert ran.codes == {0: "2", 1: "2"} and ran.message.count("planted: no (met by rank 1 of 2)") == 1, ran.message
    assert ran.steps() <= 1 and not (ran.out / "model.safetensors").exists()


# ---- a real run, watched: what moves a bit of it is core


class Watch(TorchDispatchMode):
    """Notes the innermost frame of the library in each call that writes into a weight or a gradient, or draws."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()  # storages of weights and gradients
        self.found: set[tuple[str, str]] = set()  # what, and the module

    def note(self, what: str) -> None:
        """This is done now."""
        frame: Any = sys._getframe(1)
        while frame:
            file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
            if function == looped.__name__:  # the owner's own
                return
            if file.is_relative_to(LIBRARY) and function != "__torch_dispatch__":  # that of a watch, which passes it on
                self.found.add((what, ".".join(file.relative_to(LIBRARY).with_suffix("").parts)))
                return
            frame = frame.f_back

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked, and note it."""
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.note("draws")
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                written = value if isinstance(value, list | tuple) else [value]
                if any(isinstance(each, Tensor) and _storage(each) in self.held for each in written):
                    self.note("writes")
        return function(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Holds(Observer):
    """Tells the watch which tensors are weights and gradients."""

    name = "holds"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin_step(self, view: View) -> None:
        """Weights are the same in each step."""
        model = view._loop.model
        self._watch.held = {_storage(each) for each in (*model.parameters(), *model.buffers())}
        self._kept: list[Tensor] = []  # so that nothing else gets their memory
        if view.step == 0:
            for parameter in model.parameters():
                parameter.register_hook(self._keep)

    def _keep(self, gradient: Tensor) -> None:
        self._kept.append(gradient)
        self._watch.held.add(_storage(gradient))

    def gradients(self, view: View) -> None:
        """Their sums may lie elsewhere."""
        for gradient in view.gradients().values():
            self._keep(gradient)  # type: ignore[arg-type]


@pytest.fixture
def watched(train: Train, monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[tuple[str, str]]]:
    """What a run does to its bits, and in which modules, with this observer."""

    def watched(*observers: Observer) -> set[tuple[str, str]]:
        watch = Watch()

        def noted(draw: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: (watch.note("draws"), draw())[1]

        monkeypatch.setattr(random, "random", noted(random.random))
        monkeypatch.setattr(np.random, "rand", noted(np.random.rand))
        with watch:
            train(Holds(watch), *observers)
        return watch.found

    return watched


def of_library(text: str) -> Does:
    """A function of a module of the library that is no core."""
    made: dict[str, Any] = {}
    exec(compile(text, str(LIBRARY / "record" / "planted.py"), "exec"), made)
    return made["does"]  # type: ignore[no-any-return]


def test_what_moves_a_bit_of_a_run_is_core(watched: Callable[..., set[tuple[str, str]]]):
    found = watched()
    assert {what for what, _ in found} == {"draws", "writes"}
    assert {module for _, module in found} <= {*CORE}, found
    assert all(source(module).is_file() for module in CORE)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import torch\ndef does(view): torch.rand(1)", "draws"),
        ("import random\ndef does(view): random.random()", "draws"),
        ("import numpy\ndef does(view): numpy.random.rand()", "draws"),
        ("def does(view): next(iter(view.weights().values())).data.add_(0)", "writes"),  # no version counter sees it
        ("def does(view): [each.data.add_(0) for each in view.gradients().values()]", "writes"),
    ],
)
def test_what_moves_a_bit_elsewhere_is_found(text: str, what: str, watched: Callable[..., set[tuple[str, str]]]):
    assert (what, "record.planted") in watched(planted(of_library(text), "gradients"))


# ---- the owner's function that is called with the numbers of each step


def test_function_on_log_gets_all_numbers_and_changes_no_bit(train: Train, control: dict[str, Any]):
    seen: list[tuple[int, dict[str, float]]] = []

    def show(step: int, numbers: dict[str, float]) -> None:
        drawn()
        seen.append((step, dict(numbers)))
        numbers.clear()

    assert train(show=show) == control
    assert seen == [(step, numbers) for step, numbers in control["rows"]] and "end" in seen[-1][1]


def test_function_on_log_that_raises_ends_no_run(train: Train, control: dict[str, Any]):
    """In a step, and with the last numbers, which come after all steps."""
    reported = dict[str, str]()
    for name in ("after", "end"):

        def show(step: int, numbers: dict[str, float], name: str = name) -> None:
            if name in numbers:
                raise ValueError("no disk")

        made = train(show=show)
        reported[name] = made.pop("told")
        assert made == {name: value for name, value in control.items() if name != "told"}
    assert reported == {
        "after": "step 0: on_log raised in end_step, and is left out: ValueError: no disk\n",
        "end": "on_log raised at its end: ValueError: no disk\n",
    }


def test_function_on_log_that_comes_late_is_refused(train: Train):
    def late(view: View) -> None:
        view._loop.log.__self__.on_log(print)

    assert train(planted(late, "begin_step"), code=2)["told"] == "run.on_log() came after run.steps(): call it before\n"
