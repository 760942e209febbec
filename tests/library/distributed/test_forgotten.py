"""What one forgets when one writes a loop of one's own: each slip ends the run at once, with a line that names it.

Whole loops stand in loops.py, those with a slip in slips.py and misuse.py.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attempt import inside
from loops import (
    STEPS,
    WHOLE,
    Loop,
    Numbers,
    Parts,
    broken,
    draws,
    each_step,
    good,
    loss_of,
    plain,
    summed,
    trained_with,
)
from misuse import LOST, NOTES, SLIPS, Noting, noting
from project.config import Config
from slips import backward_twice, second_optimizer
from states import parallel_of, state_of
from support import OURS as PROJECT
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samebits as sb
from samebits import front
from samebits.address.manifest import sha256_file
from samebits.base.files import read_json
from samebits.checkpoint.final import load_weights
from samebits.core import accumulate, flags
from samebits.core import state as core_state
from samebits.core.accumulate import Accumulation
from samebits.core.attributes import Attributes
from samebits.core.buffers import Buffers
from samebits.core.errors import UserError
from samebits.core.loop import Loop as TrainingLoop
from samebits.core.ranks import World
from samebits.core.step import Step
from samebits.core.summing import gradients_of
from samebits.record import names
from samebits.record.record import files as logged_files
from samebits.run import Run
from samebits.stage import alone

pytestmark = pytest.mark.usefixtures("as_a_stage")


@dataclass(frozen=True)
class Ended:
    """How a stage ended."""

    code: int
    message: str
    out: Path

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """What it logged."""
        rows = map(json.loads, (self.out / names.METRIC_ROWS).read_text().splitlines())
        return [(row["step"], row["metrics"]) for row in rows]


@pytest.fixture
def attempt(config: Config, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """A function that runs a loop as the stage `train` runs its own."""

    def attempt(loop: Loop, workers: int = 0, out: str = "run", **keys: Any) -> Ended:
        requested = inside(config, prepared, workers).model_copy(update=keys)

        def stage(config: Config, out: Path) -> None:
            with Run(PROJECT, config, out) as run:
                loop(run, Parts(run))

        capsys.readouterr()
        code = 0
        try:
            front.call(PROJECT, stage, requested, tmp_path / out)
        except SystemExit as ended:
            code = ended.code
        return Ended(code, capsys.readouterr().err, tmp_path / out)

    return attempt


@pytest.mark.parametrize("loop", WHOLE, ids=lambda loop: loop.__name__)
def test_whole_loop_is_not_refused(loop: Loop, attempt: Callable[..., Ended]):
    ended = attempt(loop)
    assert (ended.code, ended.message) == (0, "")
    assert json.loads((ended.out / names.METRICS).read_text())["steps"] == STEPS


def test_metrics_may_be_tensors_and_stay_whole_numbers_where_they_are(attempt: Callable[..., Ended]):
    metrics = json.loads((attempt(plain).out / names.METRICS).read_text())
    assert {name: type(value) for name, value in metrics.items()} == {"loss": float, "samples": int, "steps": int}


def test_metric_may_have_the_name_of_another_fact(attempt: Callable[..., Ended]):
    def loop(run: Run, parts: Parts) -> None:
        for step in parts.steps(run):
            good(step, parts)
        run.finish(weights=0.5, best=0.25)

    ended = attempt(loop)
    assert json.loads((ended.out / names.METRICS).read_text()) == {"weights": 0.5, "best": 0.25, "steps": STEPS}
    tags = read_json(ended.out / names.RUN)["tags"]
    assert tags["repro.weights"] == sha256_file(ended.out / names.WEIGHTS) and "repro.best" not in tags


@pytest.mark.parametrize(("loop", "message"), SLIPS.values(), ids=SLIPS)
def test_slip_is_refused_in_a_line_that_names_it(loop: Loop, message: str, attempt: Callable[..., Ended]):
    ended = attempt(loop)
    assert ended.code == 2
    assert ended.message.startswith(message) and ended.message.count("\n") == 1, ended.message


def test_loss_of_a_part_of_the_model_is_allowed(attempt: Callable[..., Ended]):
    """Unlike DistributedDataParallel, the sum does not depend on the model's own forward pass."""

    def around(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model[0](batch["x"]).square().mean()

    assert attempt(trained_with(around)).code == 0


@each_step
def dropping(step: Step, parts: Parts) -> None:
    """Call `zero_grad` before each micro-batch, as a loop with one batch per step does."""
    for batch in step:
        parts.optimizer.zero_grad()
        step.backward(loss_of(parts.model, batch))
    parts.optimizer.step()


def test_gradients_dropped_within_the_sum_are_kept(attempt: Callable[..., Ended]):
    plainly, ended = (attempt(loop, out=loop.__name__) for loop in (each_step(good), dropping))
    assert (plainly.out / names.WEIGHTS).read_bytes() == (ended.out / names.WEIGHTS).read_bytes()


# ---- a gradient that is not finite


def at_first(compute: Any, step: Step) -> Any:
    return compute if step.number == 0 else loss_of


@each_step
def with_a_step_that_is_not_finite(step: Step, parts: Parts) -> None:
    summed(step, parts.model, at_first(broken, step))
    parts.optimizer.step()
    step.log(loss=step.loss)


@each_step
def with_a_second_sum_that_is_not_finite(step: Step, parts: Parts) -> None:
    good(step, parts)
    summed(step, parts.model, at_first(broken, step))
    assert step.number or all(parameter.grad is None for parameter in parts.model.parameters())
    parts.optimizer.step()


@each_step
def catching(step: Step, parts: Parts) -> None:
    with suppress(Exception):
        summed(step, parts.model, at_first(broken, step))
    parts.optimizer.zero_grad()


@pytest.mark.parametrize("loop", [with_a_step_that_is_not_finite, with_a_second_sum_that_is_not_finite])
def test_gradient_that_is_not_finite_is_skipped(loop: Loop, attempt: Callable[..., Ended], config: Config):
    skip = config.compute.model_copy(update={"nonfinite": "skip"})
    ended = attempt(loop, compute=skip)
    assert (ended.code, ended.message) == (0, "")
    assert [step for step, row in ended.rows() if row.get("skipped") == 1] == [0]


@pytest.mark.parametrize(
    "loop",
    [with_a_step_that_is_not_finite, with_a_second_sum_that_is_not_finite, catching],
    ids=lambda loop: loop.__name__,
)
def test_gradient_that_is_not_finite_ends_the_run_though_it_is_caught(loop: Loop, attempt: Callable[..., Ended]):
    ended = attempt(loop)
    assert ended.code == 3
    assert (
        ended.message.startswith("step 0: the gradient is not finite in: 0.weight") and ended.message.count("\n") == 1
    )


def test_step_that_is_skipped_changes_no_weight(attempt: Callable[..., Ended], config: Config):
    """The planted fault lets the optimizer have them."""
    skip = config.compute.model_copy(update={"nonfinite": "skip"})
    weights = []

    def loop(run: Run, parts: Parts) -> None:
        for step in parts.steps(run, unsaved=("weights",)):
            before = [parameter.detach().clone() for parameter in parts.model.parameters()]
            buffers = [buffer.clone() for buffer in parts.model.buffers()]
            summed(step, parts.model, at_first(broken, step))
            weights.append(all(map(torch.equal, buffers, parts.model.buffers())))
            parts.optimizer.step()
            weights.append(all(map(torch.equal, before, parts.model.parameters())))
        run.finish()

    assert attempt(loop, compute=skip).code == 0
    assert weights == [True, True, False, False, False, False]


class Figure:
    """As matplotlib's."""

    def savefig(self, path: Path, **options: str) -> None:
        path.write_text(f"drawn as {options['format']}")


def test_texts_figures_and_files_lie_with_the_run_and_go_with_it(attempt: Callable[..., Ended], tmp_path: Path):
    """A later run of another address in the same directory moves them, and nothing of its owner's."""
    (tmp_path / "table.csv").write_text("a,b")

    def loop(run: Run, parts: Parts) -> None:
        for step in parts.steps(run):
            good(step, parts)
            run.log_text(f"text {step.number}", "samples/last.txt")
        run.log_figure(Figure(), "loss.png")
        run.log_artifact(tmp_path / "table.csv")
        run.log_artifact(tmp_path / "table.csv", "tables/other.csv")
        run.finish()

    ended = attempt(loop)
    kept = {"samples/last.txt": "text 2", "loss.png": "drawn as png", "table.csv": "a,b", "tables/other.csv": "a,b"}
    files = ended.out / names.LOGGED_FILES
    assert ended.code == 0, ended.message
    assert {name: (files / name).read_text() for name in kept} == kept
    assert read_json(ended.out / names.RUN)["files"] == sorted(kept)

    (files / "tables" / "own.txt").write_text("the owner's")
    assert attempt(plain, seed=1).code == 0
    (earlier,) = (ended.out / names.EARLIER).iterdir()
    assert {name: (earlier / names.LOGGED_FILES / name).read_text() for name in kept} == kept
    assert [path for path in files.rglob("*") if path.is_file()] == [files / "tables" / "own.txt"]

    odd = ["../../run.json", "/etc/passwd", "a/../b", "", ".hidden", "a\nb"]
    assert logged_files(earlier, {"files": odd}) == []


@pytest.mark.parametrize("at", [1, None])
def test_record_names_the_best_weights_where_the_run_ends_with_them(at: int | None, attempt: Callable[..., Ended]):
    """Not where the loop takes them back and trains on."""

    def loop(run: Run, parts: Parts) -> None:
        best = sb.Best(parts.model, higher=True)
        for step in parts.steps(run, state={"best": best}):
            good(step, parts)
            best.update(-step.number)
            if step.number == at:
                best.load()
        if at is None:
            best.load()
        run.finish()

    ended = attempt(loop)
    assert ended.code == 0, ended.message
    assert read_json(ended.out / names.RUN).get("best") == (None if at else {"step": 1, "value": 0.0})


def stopped(body: Callable[[Step, Parts], None]) -> Loop:
    """The loop of this body, with SIGTERM in its second step."""

    def loop(run: Run, parts: Parts) -> None:
        for step in parts.steps(run):
            body(step, parts)
            run._stop.came = step.number == 1  # all that the handler does

    return loop


def test_slip_after_a_resume_costs_nothing_that_was_saved(attempt: Callable[..., Ended]):
    """The run goes on where it was, once the slip is mended."""
    assert attempt(stopped(good)).code == 143
    for loop in (backward_twice, second_optimizer):
        ended = attempt(loop)
        assert ended.code == 2
        assert [path.name[:9] for path in (ended.out / names.CHECKPOINTS).iterdir()] == ["000000002"]
    ended, alone = attempt(plain), attempt(plain, out="alone")
    assert ended.code == alone.code == 0
    assert (ended.out / names.WEIGHTS).read_bytes() == (alone.out / names.WEIGHTS).read_bytes()


# ---- what the library does in place of the one who forgets: it seeds what is drawn outside the micro-batches


@pytest.mark.parametrize("forgets", [False, True])
def test_numbers_that_the_loop_draws_do_not_depend_on_rank_or_kill(
    forgets: bool, attempt: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
):
    """In one process, interrupted and resumed, and as rank 0 of two; the planted fault seeds micro-batches alone."""
    seed = TrainingLoop.seed

    def micro_batches_only(loop: TrainingLoop, step: int, micro_batch: int, number: int = 0) -> None:
        if micro_batch < loop.plan.micro_batches:
            seed(loop, step, micro_batch, number)

    if forgets:
        monkeypatch.setattr(TrainingLoop, "seed", micro_batches_only)
    alone = attempt(each_step(draws), out="alone").rows()
    assert attempt(stopped(draws), out="resumed").code == 143
    resumed = attempt(each_step(draws), out="resumed")
    varies = "made again" in resumed.message  # the record keeps the numbers of the first time
    monkeypatch.setattr(accumulate, "blocks", lambda leaves, ranks: [range(leaves // 2)])
    monkeypatch.setattr(Buffers, "odd", lambda buffers: [])  # the other rank's counts are missing
    rank = attempt(each_step(draws), out="rank").rows()
    assert varies == forgets and (alone != rank if forgets else alone == rank == resumed.rows())
    assert forgets or len({value for _, row in alone[:STEPS] for value in row.values()}) == 3 * STEPS


def test_model_made_before_the_run_follows_from_the_seed(config: Config, prepared: Path, tmp_path: Path):
    made = []

    def stage(config: Config, out: Path) -> None:
        made.append(nn.Linear(4, 4).weight)

    for seed in (0, 0, 1):
        torch.manual_seed(len(made))
        front.call(PROJECT, stage, inside(config, prepared).model_copy(update={"seed": seed}), tmp_path)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


# ---- flags that the code changes after they were set and recorded

CHANGES: dict[str, Callable[[], object]] = {
    "OMP_NUM_THREADS": lambda: torch.set_num_threads(2),
    "deterministic_debug_mode": lambda: torch.use_deterministic_algorithms(False),
    "backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "fp32_precision": lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "backends.cudnn.allow_tf32": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
    "jit_profiling_mode": lambda: torch._C._jit_set_profiling_mode(True),
}
MOMENTS = {"before step 0": 0, "at a checkpoint": 1, "after the last step": STEPS}  # how many steps are saved at most


@pytest.fixture
def threads() -> Iterator[None]:
    """One thread again, which no variable can bring back."""
    yield
    torch.set_num_threads(1)


def changing(name: str, moment: str) -> Loop:
    """The loop in which a flag is changed at this moment."""

    def loop(run: Run, parts: Parts) -> None:
        def change(now: str) -> None:
            if now == moment:
                CHANGES[name]()

        change("before step 0")
        for step in parts.steps(run):
            assert moment != "before step 0", "a step was made"
            if step.number == 1:
                change("at a checkpoint")
            good(step, parts)
        change("after the last step")
        run.finish()

    return loop


@pytest.mark.parametrize(
    ("name", "moment"), [*((name, "before step 0") for name in CHANGES), *(("OMP_NUM_THREADS", at) for at in MOMENTS)]
)
def test_switch_that_the_code_changes_ends_the_run_by_name(
    name: str, moment: str, attempt: Callable[..., Ended], config: Config, threads: None
):
    ended = attempt(changing(name, moment), checkpoint=config.checkpoint.model_copy(update={"every": 1}))
    assert ended.code == 2
    message = ended.message.splitlines()
    assert f"flag {name}: " in ended.message and all(
        "changed it after the run began: remove" in line for line in message
    )
    saved = [path.name[:9] for path in (ended.out / names.CHECKPOINTS).glob("0*")]
    assert max(map(int, saved), default=0) <= MOMENTS[moment] and not (ended.out / names.WEIGHTS).exists()


def test_relaxed_switch_is_held_to_what_was_recorded(attempt: Callable[..., Ended], config: Config, threads: None):
    relaxed = config.determinism.model_copy(update={"relax": ("OMP_NUM_THREADS", "MKL_NUM_THREADS")})
    assert attempt(changing("OMP_NUM_THREADS", "before step 0"), determinism=relaxed).code == 2
    ended = attempt(plain, determinism=relaxed, out="begun so")  # it stands in the record: two threads
    assert ended.code == 0
    assert read_json(ended.out / names.ENVIRONMENT)["preimage"]["flags"]["OMP_NUM_THREADS"] == 2


def test_evaluation_with_a_changed_switch_is_refused(
    config: Config, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: None
):
    for change, code in ((lambda: None, 0), (lambda: torch.set_num_threads(2), 2)):

        def stage(config: Config, out: Path, change: Callable[[], None] = change) -> None:
            alone(config)
            change()

        try:
            front.call(PROJECT, stage, inside(config, prepared), tmp_path)
        except SystemExit as ended:
            assert ended.code == code and "flag OMP_NUM_THREADS: 2 is effective" in capsys.readouterr().err
        else:
            assert code == 0


# ---- code that torch.jit compiles: for the calls and shapes that one process has met, where no flag forbids it


def scripted(run: Run, parts: Parts, stop: bool = False) -> None:
    """A loop whose model calls what torch.jit compiles; nothing is compiled at its begin, as in another process."""

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    class Gelu(nn.Module):
        function = staticmethod(torch.jit.script(gelu))

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    parts.model.insert(1, Gelu())
    for step in parts.steps(run):
        good(step, parts)
        step.log(gradient=parts.model[0].weight.grad.double().sum())
        run._stop.came = stop and step.number == 0
    run.finish()


@pytest.mark.parametrize("switched", [True, False])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_jit_compiles_nothing_that_depends_on_earlier_calls(
    switched: bool, attempt: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
):
    rows = [row for row in flags.FLAGS if row.name.startswith("jit_")]
    if not switched:
        monkeypatch.setattr(flags, "FLAGS", [row for row in flags.FLAGS if row not in rows])
        for row in rows:
            row.write(True)
    alone = attempt(scripted, out="alone")
    assert alone.code == 0 and attempt(partial(scripted, stop=True)).code == 143
    resumed = attempt(scripted)
    assert ((alone.code, alone.rows()) == (resumed.code, resumed.rows())) == switched


# ---- state besides the model's and the optimizer's


class Count(nn.Module):
    """A layer that counts its calls in a buffer that no state_dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return inputs * (1 + self.count)


class Scaled(nn.Module):
    """A layer with state that is neither a parameter nor a buffer, in torch's own way."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"exponent": 0, "shift": torch.zeros(1)}

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2.0 ** self.state["exponent"] + self.state["shift"]

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def with_state(run: Run, parts: Parts, stop: bool = False) -> None:
    """An average of the weights, a schedule of torch's, a counting layer, extra state and a mode; each decides bits."""
    parts.model.append(Count())
    parts.model.append(Scaled())
    average = AveragedModel(parts.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1, gamma=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer, patience=0, threshold=1e9)
    state = {"average": average, "schedule": schedule, "plateau": plateau}
    for step in run.steps(parts.model, parts.optimizer, parts.dataset, steps=STEPS, state=state):
        good(step, parts)
        schedule.step()
        plateau.step(1.0)
        average.update_parameters(parts.model)
        if step.number == 0:
            parts.model[1].eval()
            average.module[2].eval()
            parts.model[5].state = {"exponent": -1, "shift": torch.full((1,), 0.25)}
        step.log(
            teacher=average.module(torch.ones(2, 4)).sum(),
            average=average.module[0].weight.detach().sum(),
            rate=schedule.get_last_lr()[0],
            count=parts.model[4].count,
        )
        run._stop.came = stop and step.number == 0
    run.finish()


def test_state_of_the_loop_survives_a_stop(attempt: Callable[..., Ended]):
    alone, first = attempt(with_state, out="alone"), attempt(partial(with_state, stop=True))
    assert (alone.code, first.code) == (0, 143) and len(first.rows()) == 1
    resumed = attempt(with_state)
    assert resumed.code == 0 and resumed.rows() == alone.rows()
    assert (resumed.out / names.WEIGHTS).read_bytes() == (alone.out / names.WEIGHTS).read_bytes()
    assert alone.rows()[-2][1]["count"] == STEPS
    # an evaluation finds in the file what the run ended with
    model = nn.Sequential(*Parts(SimpleNamespace(world=ALONE)).model, Count(), Scaled())
    load_weights(model, resumed.out)
    assert model[5].state["exponent"] == -1 and model[5].state["shift"].item() == 0.25
    with pytest.raises(UserError, match=r"other weights than params\.yaml describes"):
        load_weights(model[:5], resumed.out)


def with_more_to_train(run: Run, parts: Parts, named: bool, stop: bool = False) -> None:
    """Layers that are trained from a step on, in a group of their own, and a rate that two groups and the loop hold.

    A third group has that rate, too, until the loop gives it another one.
    """

    def given(module: nn.Module) -> Any:
        return [*module.named_parameters()] if named else [*module.parameters()]

    base, norm, head = parts.model[0], parts.model[1], parts.model[3]
    rate, (weight, bias) = torch.tensor(0.1), given(head)
    given_first = [weight], [bias], given(norm)
    parts.optimizer = torch.optim.SGD([{"params": params} for params in given_first], lr=rate)
    for step in parts.steps(run):
        rate.mul_(0.5)
        if step.number == 0:
            parts.optimizer.param_groups[2]["lr"] = torch.tensor(0.3)
            parts.optimizer.add_param_group({"params": given(base), "lr": 0.01, "momentum": 0.9})
        good(step, parts)
        step.log(loss=step.loss, rate=rate, base=base.weight.detach().sum(), head=head.weight.detach().sum())
        run._stop.came = stop and step.number == 0
    run.finish()


@pytest.mark.parametrize("named", [False, True])
def test_parameters_that_a_step_adds_to_the_optimizer_survive_a_stop(named: bool, attempt: Callable[..., Ended]):
    loop = partial(with_more_to_train, named=named)
    alone, first = attempt(loop, out="alone"), attempt(partial(loop, stop=True))
    assert (alone.code, first.code) == (0, 143), (alone, first)
    resumed = attempt(loop)
    assert (resumed.code, resumed.rows()) == (0, alone.rows()), resumed
    assert (resumed.out / names.WEIGHTS).read_bytes() == (alone.out / names.WEIGHTS).read_bytes()


def with_an_attribute(step: Step, parts: Parts) -> None:
    """A temperature that the loop lowers; it decides bits."""
    parts.model.temperature = 0.5 * getattr(parts.model, "temperature", 1.0)
    good(step, parts, lambda model, batch: loss_of(model, batch) / model.temperature)


@pytest.mark.parametrize("forgets", [False, True])
def test_attribute_survives_a_stop(forgets: bool, attempt: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch):
    """The planted fault saves none; the step that is made again finds it."""
    alone = attempt(each_step(with_an_attribute), out="alone")
    if forgets:
        monkeypatch.setattr(Attributes, "saved", lambda attributes: {})
    first = attempt(stopped(with_an_attribute))
    resumed = attempt(each_step(with_an_attribute))
    assert (alone.code, first.code, resumed.code) == (0, 143, int(forgets)), (alone, first, resumed)
    if forgets:
        assert "loss has other bits than before the interruption" in resumed.message
    else:
        assert (alone.out / names.WEIGHTS).read_bytes() == (resumed.out / names.WEIGHTS).read_bytes()


@pytest.mark.parametrize("name", NOTES)
def test_attribute_that_each_call_changes_is_named_and_left_out(name: str, attempt: Callable[..., Ended]):
    """Once, and a resumed run begins with that of the beginning; not where the loop has named it."""
    line = f"step 0: model.{name.strip()} is changed by each micro-batch, so no checkpoint holds it. If no bit depends"
    alone = attempt(noting(NOTES[name]), out="alone")
    assert alone.code == 0 and alone.message.startswith(line) and alone.message.count("\n") == 1, alone.message
    quiet = attempt(noting(NOTES[name], unsaved=(name.strip(),)), out="quiet")
    assert (quiet.code, quiet.message) == (0, "")

    def interrupted(run: Run, parts: Parts) -> None:
        parts.model = Noting(parts.model, NOTES[name])
        stopped(good)(run, parts)

    assert attempt(interrupted).code == 143
    resumed = attempt(noting(NOTES[name]))
    assert resumed.code == 0 and resumed.message.startswith("step 2: model."), resumed.message
    assert (alone.out / names.WEIGHTS).read_bytes() == (resumed.out / names.WEIGHTS).read_bytes()


@pytest.mark.parametrize(("note", "said"), LOST.values(), ids=LOST)
def test_attribute_that_no_checkpoint_holds_is_named_once_and_the_run_goes_on(
    note: Any, said: str, attempt: Callable[..., Ended]
):
    ended = attempt(noting(note))
    harmless = "If no bit depends on it: run.steps(..., unsaved=('noted',)); else keep it in a buffer"
    line = f"model.noted {said}, so no checkpoint holds it. {harmless}"
    assert ended.code == 0 and ended.message.count("\n") == 1 and line in ended.message, ended.message
    assert read_json(ended.out / names.RUN)["unsaved"] == {"model.noted": said}
    quiet = attempt(noting(note, unsaved=("noted",)), out="quiet")
    assert (quiet.code, quiet.message) == (0, "") and "unsaved" not in read_json(quiet.out / names.RUN)


def with_a_function(step: Step, parts: Parts) -> None:
    """One that the loop changes; it decides bits."""
    factor = getattr(parts.model, "factor", lambda: 1.0)
    good(step, parts, lambda model, batch: loss_of(model, batch) * factor())
    parts.model.factor = lambda number=step.number: 2.0 + number


def test_bit_that_depends_on_such_an_attribute_is_found_by_the_step_that_is_made_again(attempt: Callable[..., Ended]):
    assert attempt(stopped(with_a_function)).code == 143
    resumed = attempt(each_step(with_a_function))
    assert resumed.code == 1 and "loss has other bits than before the interruption" in resumed.message


# ---- the step that is made again finds what a guard would have prevented


def with_a_mode(run: Run, parts: Parts) -> Iterator[Step]:
    for step in parts.steps(run):
        yield step
        parts.model[2].eval()


def with_a_variable(run: Run, parts: Parts) -> Iterator[Step]:
    factor = 1.0
    for step in parts.steps(run):
        parts.factor = factor
        yield step
        factor *= 0.5


def with_a_schedule(run: Run, parts: Parts) -> Iterator[Step]:
    schedule = torch.optim.lr_scheduler.StepLR(parts.optimizer, 3, gamma=0.5)
    for step in parts.steps(run):
        yield step
        schedule.step()


def with_a_generator(run: Run, parts: Parts) -> Iterator[Step]:
    parts.model.noise = torch.Generator()
    for step in parts.steps(run):
        parts.factor = torch.rand((), generator=parts.model.noise)
        yield step


class Counting(Numbers):
    """Its items depend on how many were made before."""

    made = 0

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        return super().__getitem__(index) | {"x": torch.full((4,), float(self.made))}


def with_items_that_count(run: Run, parts: Parts) -> Iterator[Step]:
    parts.dataset = Counting()
    yield from parts.steps(run)


class Lossy:
    """An object of the loop's own that forgets what it is given."""

    factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def with_a_lossy_object(run: Run, parts: Parts) -> Iterator[Step]:
    lossy = Lossy()
    for step in parts.steps(run, state={"lossy": lossy}):
        parts.factor = lossy.factor
        yield step
        lossy.factor *= 0.5


def nothing(*given: Any, **more: Any) -> None:
    """What is left of a guard that is off."""


beside = core_state._beside
# The loop, and its guard switched off.
FAULTS: dict[str, tuple[Callable[[Run, Parts], Iterator[Step]], str, Any]] = {
    "modes": (
        with_a_mode,
        "samebits.core.state._beside",
        lambda held: beside(held) and beside(held) | {"evaluating": []},
    ),
    "generators": (with_a_generator, "samebits.core.loop.own_generators", lambda roots: []),
    "variables": (with_a_variable, "samebits.run.Carried", lambda unsaved: SimpleNamespace(require=nothing)),
    "schedule": (with_a_schedule, "samebits.guards.updates.require_saved", nothing),
    "items": (with_items_that_count, "samebits.core.sampling.require_repeated", nothing),
    "load_state_dict": (with_a_lossy_object, "samebits.core.state._require_restored", nothing),
}


@pytest.mark.parametrize(("steps", "guard", "off"), FAULTS.values(), ids=FAULTS)
def test_fault_is_found_by_the_step_that_is_made_again_where_its_guard_is_off(
    steps: Callable[[Run, Parts], Iterator[Step]],
    guard: str,
    off: Any,
    attempt: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
):
    def loop(run: Run, parts: Parts, stop: bool) -> None:
        parts.factor = 1.0
        for step in steps(run, parts):
            good(step, parts, lambda model, batch: loss_of(model, batch) * parts.factor)
            run._stop.came = stop and step.number == 1
        run.finish()

    monkeypatch.setattr(guard, off)
    assert attempt(partial(loop, stop=True)).code == 143
    resumed = attempt(partial(loop, stop=False))
    assert resumed.code == 1 and "other bits than before the interruption" in resumed.message, resumed


@pytest.mark.parametrize("state", [{}, {"average": None}, {"averages": torch.optim.SGD([torch.ones(1)])}])
def test_other_state_than_the_checkpoint_has_is_refused(state: dict[str, Any], attempt: Callable[..., Ended]):
    def loop(run: Run, parts: Parts, first: bool) -> None:
        given = {"average": AveragedModel(parts.model)} if first else state
        for step in run.steps(parts.model, parts.optimizer, parts.dataset, steps=STEPS, state=given):
            good(step, parts)
            run._stop.came = first
        run.finish()

    assert attempt(partial(loop, first=True)).code == 143
    ended = attempt(partial(loop, first=False))
    assert ended.code == 2
    wanted = (
        "run.steps(state=...): average is a NoneType"
        if "average" in state
        else "the checkpoint holds these objects of the loop: average; run.steps(state=...) names: "
        + (", ".join(state) or "none")
    )
    assert ended.message.startswith(wanted) and ended.message.count("\n") == 1, ended.message


# ---- below the loop: micro-batches and sums, for those who call them themselves

ALONE = World(0, 1, torch.device("cpu"))
MICRO_BATCHES = 4


@pytest.fixture
def gradients() -> Accumulation:
    """Return the sum of the gradients of a small model over four micro-batches."""
    return gradients_of(state_of(nn.Linear(4, 1)), parallel_of(MICRO_BATCHES), ALONE)


def loss(gradients: Accumulation) -> Tensor:
    return gradients.module(torch.ones(1, 4)).sum()


@pytest.mark.parametrize(
    ("times", "message"),  # how often each micro-batch is added; after fewer than all the loop is left
    [
        ((1, 1, 1, 1), None),
        ((1, 1, 0, 1), r"^micro-batch 2: step\.backward\(loss\) was not called; call it once for each micro-batch$"),
        ((1, 1), r"^micro-batch 1: step\.backward\(loss\) was not called before the end of the sum$"),
        ((2, 1, 1, 1), r"^micro-batch 0: step\.backward\(loss\) was called twice; "),
    ],
)
def test_each_micro_batch_is_added_once(times: tuple[int, ...], message: str | None, gradients: Accumulation):
    with pytest.raises(UserError, match=message) if message else nullcontext():
        for _ in range(2):
            for micro_batch in gradients.micro_batches():
                for _ in range(times[micro_batch]):
                    gradients.add(loss(gradients))
                if micro_batch + 1 == len(times) < MICRO_BATCHES:
                    break
            if message is None or len(times) < MICRO_BATCHES:
                gradients.reduce()


def test_sum_that_is_never_reduced_is_refused(gradients: Accumulation):
    for _ in gradients.micro_batches():
        gradients.add(loss(gradients))
    with pytest.raises(UserError, match=r"^gradients were added but never reduced: "):
        next(gradients.micro_batches())
