"""Early ends, objects of the loop, orders of samples and logged files, as one misuses them; registered in slips.py."""

import copy
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from loops import Loop, Parts, each_step, good, loss_of
from slips import SLIPS as SLIPS
from slips import kept, slip
from torch import Tensor, nn

import samebits as sb
from samebits.core.step import Step
from samebits.run import Run


@slip("run.finish() came in step 1, before its end")
def break_after_a_stop(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        good(step, parts)
        if step.number == 1:
            run.stop("enough")
            break
    run.finish()


@slip("run.stop() came before run.steps(): it ends the run after a step")
def stop_before_the_steps(run: Run, parts: Parts) -> None:
    run.stop("enough")


@slip("run.stop() came outside the loop over run.steps(): call it in the step that is to be last")
def stop_after_the_loop(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        good(step, parts)
    run.stop("enough")


@slip("step 0: run.stop() came before its gradients: call it after them")
def stop_before_the_sum(run: Run, parts: Parts) -> None:
    for _ in parts.steps(run):
        run.stop("enough")


@slip("step 0: run.stop() came before its gradients: call it after them")
def stop_in_the_sum(run: Run, parts: Parts) -> None:
    for step in parts.steps(run):
        for batch in step:
            step.backward(loss_of(parts.model, batch))
            run.stop("enough")


REASONS = {"": "''", "two\nlines": "'two\\nlines'", "x" * 201: f"'{'x' * 58}…", 3: "3"}
for reason, said in REASONS.items():

    def stop_for(run: Run, parts: Parts, reason: Any = reason) -> None:
        for step in parts.steps(run):
            good(step, parts)
            run.stop(reason)

    kept(f"stop for {said[:8]}", f"run.stop(): {said} given, a reason of one line and 200 characters wanted", stop_for)


TOO_EARLY = "0.weight: its gradient is used inside `for batch in step:`, where it is not complete, so the line would"


def within(name: str, line: Callable[[Parts, list[nn.Parameter]], object]) -> None:
    """A slip: this line comes after the backward pass of each micro-batch."""

    @each_step
    def loop(step: Step, parts: Parts) -> None:
        for batch in step:
            step.backward(loss_of(parts.model, batch))
            line(parts, [*parts.model.parameters()])
        parts.optimizer.step()

    kept(f"{name} within", TOO_EARLY, loop)


def add_noise(parts: Parts, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad += 0.1 * torch.randn_like(parameter)


within("clip_grad_norm_", lambda parts, parameters: nn.utils.clip_grad_norm_(parameters, 1.0))
within("clip_grad_value_", lambda parts, parameters: nn.utils.clip_grad_value_(parameters, 1.0))
within("sb.clip_grad_norm_", lambda parts, parameters: sb.clip_grad_norm_(parameters, 1.0))
within("noise", add_noise)
within("norm of the gradient", lambda parts, parameters: parameters[0].grad.norm())
within("gradient of one's own", lambda parts, parameters: setattr(parameters[0], "grad", torch.ones(8, 4)))
within(
    "clip of the groups",
    lambda parts, parameters: nn.utils.clip_grad_norm_(parts.optimizer.param_groups[0]["params"], 1.0),
)


@slip("run.steps(order=...): other samples at a second call: let it depend on the number of samples and the key ")
def order_that_is_drawn(run: Run, parts: Parts) -> None:
    for step in parts.steps(run, order=lambda samples, key: sb.Weighted(torch.rand(samples))(samples, key)):
        good(step, parts)


class Stream(torch.utils.data.IterableDataset[int]):
    """Samples one after another, of which somebody says how many there are."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))

    def __len__(self) -> int:
        return 100


@slip(
    "run.steps(): a Stream given, a dataset with __len__ and __getitem__ wanted: a stream has no samples to order; let "
)
def stream_of_samples(run: Run, parts: Parts) -> None:
    parts.dataset = Stream()
    for step in parts.steps(run):
        good(step, parts)


@slip("samebits.ByLength: lengths: 3 given, 100 wanted, one for each sample of the dataset")
def lengths_of_another_dataset(run: Run, parts: Parts) -> None:
    for step in parts.steps(run, order=sb.ByLength([1, 2, 3], 4)):
        good(step, parts)


@slip("'../there.txt': a name such as figures/loss.png wanted, without ., - or ~ before a part")
def text_that_would_lie_elsewhere(run: Run, parts: Parts) -> None:
    run.log_text("text", "../there.txt")


@slip("run.log_figure(): a list given, a figure with savefig() wanted")
def figure_that_is_none(run: Run, parts: Parts) -> None:
    run.log_figure([1, 2], "figure.png")


@slip("run.log_artifact(): nowhere.csv: no file there")
def file_that_is_nowhere(run: Run, parts: Parts) -> None:
    run.log_artifact("nowhere.csv")


@slip("scaler.step(optimizer): a gradient scaler belongs to float16, and its factor follows overflows. Set ")
def scaler_of_gradients(run: Run, parts: Parts) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in parts.steps(run):
        for batch in step:
            step.backward(scaler.scale(loss_of(parts.model, batch)))
        scaler.step(parts.optimizer)
        scaler.update()


UNHELD: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], object]]] = {
    "Patience": (lambda model: sb.Patience(2, higher=True), lambda held: held.update(0.5)),
    "Best": (lambda model: sb.Best(model, higher=True), lambda held: held.update(0.5)),
    "Average": (lambda model: sb.Average(model, 0.9), lambda held: held.update()),
}


def unheld(run: Run, parts: Parts, name: str) -> None:
    make, use = UNHELD[name]
    held = make(parts.model)
    for step in parts.steps(run):
        good(step, parts)
        use(held)


for name in UNHELD:
    message = f"samebits.{name}: used, and no checkpoint holds it: give it to run.steps(..., state={{'{name.lower()}': "
    kept(f"{name} that no checkpoint holds", message, partial(unheld, name=name))


@slip("samebits.Best.load(): nothing is kept yet: call update() first")
def best_of_nothing(run: Run, parts: Parts) -> None:
    best = sb.Best(parts.model, higher=True)
    for step in parts.steps(run, state={"best": best}):
        good(step, parts)
    best.load()


@slip("samebits.Best.update('0.5 points'): one number wanted")
def best_by_a_word(run: Run, parts: Parts) -> None:
    best = sb.Best(parts.model, higher=True)
    for step in parts.steps(run, state={"best": best}):
        good(step, parts)
        best.update("0.5 points")  # type: ignore[arg-type]


@slip("samebits.Average(decay=1.0): at least 0 and less than 1 wanted")
def average_that_never_moves(run: Run, parts: Parts) -> None:
    sb.Average(parts.model, 1.0)


def carries(value: str, change: str) -> Callable[[Loop], Loop]:
    """The loop carries a variable, which is `value` before it and changed by this line."""

    def named(loop: Loop) -> Loop:
        lines, first = inspect.getsourcelines(loop)
        (line,) = (first + place for place, text in enumerate(lines) if text.strip() == change)
        message = (
            f"misuse.py:{line}: {change.split()[0]} changes from step to step and no checkpoint holds it: a resumed "
        )
        return kept(loop.__name__, f"{message}run begins with {value} again. Use step.number, samebits.Best", loop)

    return named


@carries("0.0", "best = max(best, float(step.loss))")
def best_in_a_variable(run: Run, parts: Parts) -> None:
    best = 0.0
    for step in parts.steps(run):
        good(step, parts)
        if step.ends_epoch():
            best = max(best, float(step.loss))


@carries("0", "waited = waited + 1 if step.number else 0")
def patience_in_a_variable(run: Run, parts: Parts) -> None:
    waited = 0
    for step in parts.steps(run):
        good(step, parts)
        waited = waited + 1 if step.number else 0
        if waited > 5:
            run.stop("enough")


@carries("None", "chosen = copy.deepcopy(parts.model.state_dict())")
def weights_in_a_variable(run: Run, parts: Parts) -> None:
    chosen = None
    for step in parts.steps(run):
        good(step, parts)
        if step.number == 1:
            chosen = copy.deepcopy(parts.model.state_dict())
    parts.model.load_state_dict(chosen)


@carries("tensor(0.)", "smooth = 0.9 * smooth + 0.1 * step.loss")
def smoothed_loss_in_a_variable_of_a_generator(run: Run, parts: Parts) -> None:
    def steps() -> Iterator[Step]:
        yield from enumerate(parts.steps(run))

    smooth = torch.zeros(())
    for _, step in steps():
        good(step, parts)
        smooth = 0.9 * smooth + 0.1 * step.loss


@slip(
    "history was changed by the loop, from [], and no checkpoint holds it: a resumed run begins with that again. Use "
)
def history_in_a_list(run: Run, parts: Parts) -> None:
    history: list[Any] = []
    for step in parts.steps(run):
        good(step, parts)
        history.append(step.loss)
    run.finish()


@slip("state was changed by the loop, from {'best': 0.0}, and no checkpoint holds it: a resumed run begins with that ")
def best_in_a_dict(run: Run, parts: Parts) -> None:
    state = {"best": 0.0}
    for step in parts.steps(run):
        good(step, parts)
        state["best"] = max(state["best"], step.loss.item())
    run.finish()


@slip("samebits.Patience(0, by=0.0): a limit of at least 1 and by >= 0 wanted")
def no_patience(run: Run, parts: Parts) -> None:
    sb.Patience(0, higher=True)


# ---- attributes that no checkpoint can hold


class Noting(nn.Module):
    """The model inside, of whose calls this notes something."""

    def __init__(self, model: nn.Module, note: Callable[["Noting", Tensor], object]) -> None:
        super().__init__()
        self.model, self.note, self.calls, self.noted = model, note, 0, None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.model(inputs)
        self.note(self, outputs)
        return outputs


def noting(note: Callable[[Noting, Tensor], object], **keys: Any) -> Loop:
    """The loop with a model that notes this of each call."""

    def loop(run: Run, parts: Parts) -> None:
        parts.model = Noting(parts.model, note)
        for step in parts.steps(run, **keys):
            good(step, parts)
        run.finish()

    return loop


def count(module: Noting, outputs: Tensor) -> None:
    module.calls += 1


def keep(module: Noting, outputs: Tensor) -> None:
    module.noted = outputs


def keep_values(module: Noting, outputs: Tensor) -> None:
    module.noted = [outputs.detach()]


NOTES = {"calls": count, "noted": keep, "noted ": keep_values}


def once(made: Callable[[], Any]) -> Callable[[Noting, Tensor], None]:
    """Has the model make something at its first call."""

    def note(module: Noting, outputs: Tensor) -> None:
        if module.noted is None:
            module.noted = made()

    return note


def grow(module: Noting, outputs: Tensor) -> None:
    module.noted = lambda: module.calls


# What ordinary code keeps that no checkpoint holds, and what is said of it.
LOST = {
    "lock": (once(threading.Lock), "has changed, and is a lock"),
    "file": (once(Path(os.devnull).open), "has changed, and is a TextIOWrapper"),
    "function": (once(lambda: torch.relu), "has changed, and is a builtin_function_or_method"),
    "lambda": (grow, "has changed, and is a function"),
    "cache": (once(lambda: numpy.zeros(9 << 20)), "has changed, and is a ndarray of 72 MiB, more than 64"),
    "items": (once(lambda: [0] * 200_000), "has changed, and is a list of 200000 items, more than 100000"),
    "inside": (once(lambda: {"lock": threading.Lock()}), "has changed, and is a lock (model.noted['lock'])"),
}
