"""What agreement between ranks and the trace cost per step: a table in docs/cost.md.

    python tools/step_cost.py

The variants take turns step by step in one process group, so that whatever else the machine does hits all
of them alike; each is compared with the plain step of the same round. CPU, one thread per rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from about import about
from bake import NAME, PACKAGE, ROOT, VENV, bake, in_venv, make_venv

FOLDER = ROOT / "build" / "cost"
PROJECT = FOLDER / NAME
RESULT = ROOT / "docs" / "cost.md"
SIZES = (1, 2, 4)
# (settings of the model, settings of the batch): the project's own, and one of some million parameters
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ConvNet": ({}, {}),
    "transformer": ({"name": "transformer", "width": 384, "depth": 3}, {"global_batch": 8}),
}
SECONDS = 25  # per model and world size
# What is added, and to which other variant; the trace's share of a step travels with the flag.
VARIANTS = {
    "plain": ("", ""),
    "flag": ("flag of SIGTERM, every step", "plain"),
    "compare": ("`integrity.compare_every`", "plain"),
    "recompute": ("`integrity.recompute_every`", "plain"),
    "step": ("`trace.level: step`", "flag"),
    "tensor": ("`trace.level: tensor`", "flag"),
}


# ---- on each rank, under torchrun


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of the steps of each variant, and the number of parameters."""
    from repro_project.config import Config
    from repro_project.repro.config.params import load
    from repro_project.repro.core.flags import apply, set_environment

    config = load(Config, Path("params.yaml"), ["device=cpu"])
    set_environment(config.determinism)  # before torch is imported
    import torch
    from repro_project.model import build
    from repro_project.repro.core import ranks as world
    from repro_project.repro.core.accumulate import Accumulation
    from repro_project.repro.core.exact import clip_grad_norm_
    from repro_project.repro.core.optimizers import Optimizers
    from repro_project.repro.core.seeds import derive, seed_everything
    from repro_project.repro.environment import agreement
    from repro_project.repro.trace.trace import Trace
    from repro_project.train import micro_batch_loss, parameter_groups

    apply(config.determinism)
    of_model, of_batch = MODELS[name]
    settings = config.parallel.model_copy(update=of_batch)
    ranks = world.join("cpu", settings)

    torch.manual_seed(0)
    model = build(config.model_copy(update={"model": config.model.model_copy(update=of_model)}))
    gradients = Accumulation(model, settings, ranks)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4, fused=True)
    now = ""  # the variant whose turn it is

    class Armed(Trace):
        """Looks at the modules' outputs in its own turn only, for all variants train one model."""

        def _output(self, *arguments: Any) -> None:
            if now == self.level:
                super()._output(*arguments)

    FOLDER.mkdir(parents=True, exist_ok=True)
    traces = {level: Armed(level, Path(tempfile.mkdtemp(dir=FOLDER)), ranks) for level in ("off", "step", "tensor")}
    for trace in traces.values():
        trace.begin(model, Optimizers(optimizer, model), 0, outputs=True)
    size = settings.global_batch // settings.micro_batches
    batch = [torch.rand(size, 1, 8, 8), torch.arange(size) % 10]

    def meet() -> None:
        ranks.sum(torch.zeros(1))

    def loss_of(step: int, micro_batch: int) -> torch.Tensor:
        seed_everything(derive(0, "micro-batch", step, micro_batch))
        return micro_batch_loss(model, batch)

    def run(step: int, variant: str) -> float:
        nonlocal now
        now, trace = variant, traces.get(variant, traces["off"])
        meet()
        start = time.perf_counter()
        for micro_batch in gradients.micro_batches(step % settings.micro_batches if variant == "recompute" else None):
            trace.batch(micro_batch, batch)
            gradients.add(partial(loss_of, step, micro_batch))
        trace.gradients(gradients.reduce())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if VARIANTS[variant][1] == "flag" or variant == "flag":
            (_, *shares), _ = ranks.totals([0], trace.contribution(), [])
            trace.step(step, shares, last=False)
        if variant == "compare":
            agreement.require_same_weights(model.state_dict(), step, ranks)
        meet()  # the recomputing rank is waited for, as it is in the next reduce of a training
        return 1000 * (time.perf_counter() - start)

    steps: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:
        run(0, variant)
    end, number = time.monotonic() + seconds, 0
    while ranks.total(time.monotonic() > end) == [0]:
        turn, order = number % len(VARIANTS), list(VARIANTS)
        for variant in order[turn:] + order[:turn]:
            steps[variant].append(run(number, variant))
        number += 1
    world.leave()
    return {"steps": steps, "parameters": sum(p.numel() for p in model.parameters())}


def thousand_ranks() -> tuple[float, int, str]:
    """Seconds to compare 1024 ranks' reports of a real run, with a few odd ones; fields; the text."""
    from repro_project.repro.base.text import flatten
    from repro_project.repro.environment import agreement

    preimage = json.loads((PROJECT / "artifacts" / "address.json").read_text())["preimage"]
    environment = json.loads((PROJECT / "artifacts" / "environment.json").read_text())["preimage"]
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


def rows(model: str, ranks: int, measured: dict[str, Any]) -> list[str]:
    """The lines of the table on one model and world size."""
    steps, millions = measured["steps"], measured["parameters"] / 1e6
    lines = []
    for variant, (title, base) in VARIANTS.items():
        if not base or (ranks == 1 and variant == "compare"):  # one rank has nobody to compare with
            continue
        plain = statistics.median(steps[base])
        extra = [other - one for one, other in zip(steps[base], steps[variant], strict=True)]
        low, middle, high = statistics.quantiles(extra, n=4)
        every = f"{100 * middle / plain:+.1f} %"
        rarely = f"{2 * middle / plain:+.2f} %" if title.startswith("`integrity") else ""
        cells = (
            f"{model}, {millions:.2g} M", ranks, f"{plain:.0f}", title,
            f"{middle:+.1f} ({low:+.1f} … {high:+.1f})", every, rarely, len(extra),
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def torchrun(ranks: int, model: str, python: Path) -> dict[str, Any]:
    """What rank 0 measured."""
    result = FOLDER / f"{model}-{ranks}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [str(python), *launcher, str(Path(__file__)), "--model", model, "--result", str(result)]
    subprocess.run(command, cwd=PROJECT, env=in_venv(PROJECT), check=True)
    return json.loads(result.read_text())


def main() -> None:
    """Measure everything and write the document."""
    python = VENV / "bin" / "python"
    make_venv(bake(FOLDER))
    place = about()
    lines = [line for model in MODELS for ranks in SIZES for line in rows(model, ranks, torchrun(ranks, model, python))]

    def printed(*words: str) -> str:
        done = subprocess.run([python, *words], cwd=PROJECT, env=in_venv(PROJECT), check=True, stdout=subprocess.PIPE)
        return done.stdout.decode()

    printed("-m", f"{PACKAGE}.prepare")
    printed("-m", f"{PACKAGE}.train", "--set", "train.epochs=1", "--set", "tracking.enabled=false")
    told = printed(__file__, "--table")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(DOCUMENT.format(rows="\n".join(lines), seconds=SECONDS, place=place, **json.loads(told)))
    print(RESULT.read_text())


DOCUMENT = """# What agreement between ranks, and the trace, cost

Written by `make step-cost`. {place}

One thread per rank, `determinism.cpu: portable`.

| model | ranks | step without, ms | added | ms per step (quartiles) | every step | every 50th | rounds |
|---|---|---|---|---|---|---|---|
{rows}

- In a round each variant makes one step, in turns, within one process group; `ms per step` is the median of
  its differences from the step without it in the same round. So other work on the machine hits all variants alike.
  The quartiles show how much single steps vary.
- "Every 50th" is the cost of every step divided by 50. The flag is looked at after every step, always.
- A recomputed micro-batch is one more forward and backward pass on one rank, for which the others wait: one beside
  the `micro_batches / ranks` of a step. So its price grows with the number of ranks.
- The ConvNet trains on 64 samples per step, the transformer on 8: its weights weigh more than its arithmetic.
- Ranks beyond the number of cores take turns on them, which a machine for training would not do.

## The table of 1024 ranks

Reports of {fields} fields each, as a run gathers them; eight ranks have another numpy, one another variable,
one other code. Compared and written in {took:.2f} s:

```
{text}
```
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        took, fields, text = thousand_ranks()
        print(json.dumps({"took": took, "fields": fields, "text": text}))
    elif arguments.model:
        measured = measure(arguments.model, arguments.seconds)
        if os.environ.get("RANK", "0") == "0":
            arguments.result.write_text(json.dumps(measured))
    else:
        main()
