"""What agreement between ranks, the trace and the look at attributes cost per step: a table in docs/cost.md.

    python tools/step_cost.py

The variants take turns step by step in one process group, so that whatever else the machine does hits all
of them alike; each is compared with the plain step of the same round. CPU, one thread per rank.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bake import ROOT
from harness import about, arguments, configured, in_turn, prepared, printed, spread, table, within, write

RESULT = ROOT / "docs" / "cost.md"
SIZES = (1, 2, 4)
# (settings of the model, settings of the batch): the project's own, one of some million parameters, and a deep one
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ConvNet": ({}, {}),
    "transformer": ({"name": "transformer", "width": 384, "depth": 3}, {"global_batch": 8}),
    "deep transformer": ({"name": "transformer", "width": 64, "depth": 20}, {"global_batch": 8}),
}
SECONDS = 25.0  # per model and world size
# What is added, and to which other variant; the trace's share of a step travels with the flag.
VARIANTS = {
    "plain": ("", ""),
    "flag": ("flag of SIGTERM, every step", "plain"),
    "compare": ("`integrity.compare_every`", "plain"),
    "recompute": ("`integrity.recompute_every`", "plain"),
    "attributes": ("attributes, in a step that is saved", "plain"),
    "step": ("`trace.level: step`", "flag"),
    "tensor": ("`trace.level: tensor`", "flag"),
}

RARE = "compare", "recompute", "attributes"  # not in every step


# ---- on each rank, under torchrun


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of the steps of each variant, and the number of parameters."""
    config = configured("device=cpu")
    import torch
    from repro_project.model import build
    from repro_project.train import parameter_groups

    from samebits.core import ranks as world
    from samebits.core.accumulate import Accumulation
    from samebits.core.exact import clip_grad_norm_
    from samebits.core.observer import View
    from samebits.core.seeds import derive, seed_everything
    from samebits.core.state import State
    from samebits.guards import agreement
    from samebits.guards.unsaved import UnsavedState
    from samebits.trace.trace import Trace

    of_model, of_batch = MODELS[name]
    settings = config.parallel.model_copy(update=of_batch)
    ranks = world.join("cpu", settings)

    torch.manual_seed(0)
    model = build(config.model_copy(update={"model": config.model.model_copy(update=of_model)}))
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4, fused=True)
    state = State.of(model, optimizer, {})
    gradients = Accumulation(state, settings, ranks)
    now = ""  # the variant whose turn it is

    class Armed(Trace):
        """Looks at the modules' outputs in its own turn only, for all variants train one model."""

        def _output(self, *arguments: Any) -> None:
            if now == self.level:
                super()._output(*arguments)

    Path("build").mkdir(exist_ok=True)
    traces = {level: Armed(level, Path(tempfile.mkdtemp(dir="build")), ranks) for level in ("off", "step", "tensor")}
    for trace in traces.values():
        trace.begin(state, 0, outputs=True)
    # what a view asks of a loop
    plan = SimpleNamespace(micro_batches=settings.micro_batches)
    loop: Any = SimpleNamespace(
        model=model, optimizers=state.optimizers, state=state, world=ranks, stop=sys.maxsize, plan=plan
    )
    unsaved = UnsavedState(loop, 0, 1, print)  # in each step of its turn
    size = settings.global_batch // settings.micro_batches
    batch = images, labels = torch.rand(size, 1, 8, 8), torch.arange(size) % 10

    def meet() -> None:
        ranks.sum(torch.zeros(1))

    def loss_of(step: int, micro_batch: int) -> torch.Tensor:
        seed_everything(derive(0, "micro-batch", step, micro_batch))
        return torch.nn.functional.cross_entropy(model(images), labels)

    steps = itertools.count()

    def run(variant: str) -> float:
        nonlocal now
        step, now, trace = next(steps) // len(VARIANTS), variant, traces.get(variant, traces["off"])
        view = partial(View, loop, step)
        meet()
        start = time.perf_counter()
        looks = variant == "attributes"
        trace.begin_step(view())
        if looks:
            unsaved.begin_step(view())
        for micro_batch in gradients.micro_batches(step % settings.micro_batches if variant == "recompute" else None):
            trace.batch(view(micro_batch, batch))
            if looks:
                unsaved.batch(view(micro_batch, batch))
            gradients.add(loss_of(step, micro_batch))
        trace.gradients(view(loss=gradients.reduce()))
        if looks:
            unsaved.gradients(view())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if VARIANTS[variant][1] == "flag" or variant == "flag":
            terms = trace.ballot(view()).sums
            (_, *shares), _ = ranks.totals([0], torch.zeros(0, dtype=torch.int64) if terms is None else terms, [])
            trace.end_step(view(), shares, [])
        if looks:
            unsaved.require()
            state.attributes.saved()  # which the checkpoint holds
        if variant == "compare":
            agreement.require_same_weights(model.state_dict(), step, ranks)
        meet()  # the recomputing rank is waited for, as it is in the next reduce of a training
        return 1000 * (time.perf_counter() - start)

    in_turn(VARIANTS, run, range(1))  # warms up
    end = time.monotonic() + seconds
    found = in_turn(VARIANTS, run, iter(lambda: ranks.total(time.monotonic() > end) == [0], False))
    world.leave()
    parameters, modules = sum(p.numel() for p in model.parameters()), len([*model.modules()])
    return {"steps": found, "parameters": parameters, "modules": modules}


def thousand_ranks() -> tuple[float, int, str]:
    """Seconds to compare 1024 ranks' reports of a real run, with a few odd ones; fields; the text."""
    from samebits.base.text import flatten
    from samebits.guards import agreement

    preimage, environment = (
        json.loads(Path("artifacts", name).read_text())["preimage"] for name in ("address.json", "environment.json")
    )
    report = flatten(preimage | {"environment": environment})
    reports = [dict(report) for _ in range(1024)]
    for rank in range(64, 72):
        reports[rank]["environment.numpy"] = "2.4.5"
    reports[517]["environment.variables.NCCL_ALGO"] = "Ring"
    reports[900]["code.model.py"] = "0" * 64
    hosts = [f"node{rank // 8:03d} cuda:{rank % 8}" for rank in range(1024)]
    start = time.perf_counter()
    groups = agreement.disagreements(reports, hosts)
    text = f"{agreement.table(groups)}\n{agreement.blame(groups, len(reports))}"
    return time.perf_counter() - start, len(report), text


# ---- here


def rows(model: str, ranks: int, measured: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    """The lines of the table on one model and world size."""
    title = f"{model}, {measured['parameters'] / 1e6:.2g} M, {measured['modules']} modules"
    steps = measured["steps"]
    for variant, (added, base) in VARIANTS.items():
        if not base or (ranks == 1 and variant == "compare"):  # one rank has nobody to compare with
            continue
        plain = statistics.median(steps[base])
        extra = [other - one for one, other in zip(steps[base], steps[variant], strict=True)]
        low, middle, high = statistics.quantiles(extra, n=4)
        rarely = f"{2 * middle / plain:+.2f} %" if variant in RARE else ""
        every, more = f"{100 * middle / plain:+.1f} %", spread(low, middle, high, "+.1f")
        yield title, ranks, f"{plain:.0f}", added, more, every, rarely, len(extra)


HEAD = "model | ranks | step without, ms | added | ms per step (quartiles) | every step | every 50th | rounds"
REPORTS = """Reports of {} fields each, as a run gathers them; eight ranks have another numpy, one another variable,
one other code. Compared and written in {:.2f} s:

```
{}
```"""


def main() -> None:
    """Measure everything and write the table into the document."""
    requested = arguments(__doc__, RESULT, MODELS, seconds=SECONDS)
    with prepared() as project:
        place, cases = about(), itertools.product(requested.only, SIZES)
        measured = ((*case, within(project, measure, case[0], requested.seconds, ranks=case[1])) for case in cases)
        steps = table(HEAD, itertools.chain.from_iterable(rows(*found) for found in measured))
        printed(project, "-m", "samebits", "train", "--set", "train.epochs=1", "--set", "tracking.enabled=false")
        took, fields, text = within(project, thousand_ranks)
    write(requested.out, place, steps, "## The table of 1024 ranks", REPORTS.format(fields, took, text))


if __name__ == "__main__":
    main()
