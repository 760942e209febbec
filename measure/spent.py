"""Where the time of a step goes, in the project and in a plain script with its flags: microseconds of CPU time.

python measure/spent.py [--only convnet] [--steps N]

A function is timed without those that are timed within it. The time is the thread's on the CPU, which other work on the
machine changes least. A timer takes about a microsecond itself, and what is called for each sample holds it as often.
"""

import functools
import importlib
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import rank
from rounds import ALWAYS, PINNED, WORKLOADS, harness

DIGITS = [name for name, workload in WORKLOADS.items() if not workload.recipe]
WARM, OTHER = 20, "all else, in Python"
# what is timed -> functions as module:name; those of the project's library without its package
ITEMS: dict[str, tuple[str, ...]] = {
    "forward": ("repro_project.train:micro_batch_loss",),
    "backward": ("torch:Tensor.backward",),
    "optimizer": ("torch.optim:AdamW.step",),
    "norm of the gradients": ("torch.nn.utils:clip_grad_norm_", "core.exact:clip_grad_norm_"),
    "samples": ("repro_project.data:Digits.__getitem__",),
    "collating": ("torch.utils.data._utils.collate:default_collate",),
    "batches: the rest of the loader": (
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
        "core.sampling:Plan.keys_of",
    ),
    "samples: seeds and generators": ("core.sampling:Seeded.__getitems__", "core.generators:seeded"),
    "files that are opened": ("guards.opened:require_known",),
    "micro-batches: seeds": ("core.loop:Loop.seed",),
    "gradients: a micro-batch begins": ("core.accumulate:Accumulation.micro_batches",),
    "gradients: taken from autograd": ("core.accumulate:Accumulation._take",),
    "gradients: added in the tree": ("core.accumulate:Accumulation._add", "core.accumulate:Bucket.push"),
    "gradients: the means": ("core.accumulate:Accumulation._give",),
    "gradients: reduce": ("core.accumulate:Accumulation.reduce",),
    "gradients: are finite": ("core.finite:nonfinite",),
    "a missing line is refused": tuple(f"core.guard:Guard.{name}" for name in ("begin", "add", "take", "end")),
    "buffers": tuple(f"core.buffers:Buffers.{name}" for name in ("begin", "restore", "add", "send", "reduce")),
    "trace: digest of batches": ("core.digest:combined_digests",),
    "trace: digests of gradients and weights": ("core.digest:held_digests",),
    "trace: times of phases": ("trace.timings:Timings.write", "trace.timings:Timings.ends"),
    "trace: its rows": ("trace.trace:Trace._write",),
    "trace: the rest": tuple(f"trace.trace:Trace.{name}" for name in ("batch", "gradients", "end_step", "flush")),
    "sums over the ranks": ("core.ranks:World.totals", "core.ranks:World.sum"),
    "log of metrics": ("run:Run.log", "trace.metrics:Metrics._put"),
    "attributes of modules": ("guards.unsaved:UnsavedState.look",),
    "the rest of a step's end": ("core.loop:Loop._end", "core.loop:Loop._report"),
    "updates are watched": ("guards.updates:Updates._check", "guards.updates:Updates.begin_step"),
    "shapes": ("tracking.logged:Shapes._note",),
}


class Spent:
    """Timers that know which one is at work: the time of a function within a function counts once."""

    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self._stack, self._since = [OTHER], time.thread_time_ns()

    def _turn(self) -> None:
        now = time.thread_time_ns()
        self.nanoseconds[self._stack[-1]] += now - self._since
        self._since = now

    def enter(self, item: str) -> None:
        """What is spent from here on is the item's."""
        self._turn()
        self._stack.append(item)

    def leave(self) -> None:
        """And no longer."""
        self._turn()
        self._stack.pop()

    def timed(self, item: str, function: Any) -> Any:
        """The function with a timer; of a generator, of each of its values."""

        @functools.wraps(function)
        def call(*words: Any, **named: Any) -> Any:
            self.enter(item)
            try:
                found = function(*words, **named)
            finally:
                self.leave()
            return self._each(item, found) if hasattr(found, "gi_frame") else found

        return call

    def _each(self, item: str, values: Any) -> Any:
        while True:
            self.enter(item)
            try:
                value = next(values)
            except StopIteration:
                return
            finally:
                self.leave()
            yield value

    def watch(self) -> list[str]:
        """Time all ITEMS, wherever they were imported to; those that are not there."""
        missing = []
        for item, functions in ITEMS.items():
            for path in functions:
                module, _, name = path.partition(":")
                package = module.startswith(("torch", "repro_project"))
                held: Any = importlib.import_module(module if package else f"repro_project.repro.{module}")
                *outer, last = name.split(".")
                for each in outer:
                    held = getattr(held, each)
                function = getattr(held, last, None)
                if function is None:
                    missing.append(path)
                    continue
                timed = self.timed(item, function)
                places = [held] if outer else [*map(vars, list(sys.modules.values()))]
                for place in places:
                    if outer:
                        setattr(place, last, timed)
                    elif place.get(last) is function:
                        place[last] = timed
        return missing


class Counted:
    """In place of a pace: so many steps, and what was spent in them."""

    steps, spent = 0, Spent()

    def __init__(self, slower: float) -> None:
        missing = Counted.spent.watch()  # before hooks are made of the functions
        assert not missing, missing
        self._step = 0

    def begins(self) -> None:
        """A step begins."""
        spent = Counted.spent
        if self._step == WARM:
            spent._turn()
            spent.nanoseconds.clear()
        if self._step == WARM + Counted.steps:
            spent._turn()
            harness.leave({item: number / 1000 / Counted.steps for item, number in spent.nanoseconds.items()})
            os._exit(0)
        self._step += 1


def spend(script: str, workload: str, steps: int) -> None:
    """Train until that is counted: microseconds per step of each item."""
    Counted.steps, rank.Pace = steps, Counted
    out = f"build/spent-{script}-{workload}"
    sys.argv[1:] = [script, "0", out, *ALWAYS, *WORKLOADS[workload].settings]
    rank.main()


def tables(project: Path, only: list[str], steps: int) -> None:
    """Print a table for each workload, the largest differences first."""
    for workload in only:
        ours, plain = (
            harness.within(project, spend, script, workload, steps, variables=harness.ONE_THREAD)
            for script in ("ours", PINNED)
        )
        items = sorted({*ours, *plain}, key=lambda item: plain.get(item, 0) - ours.get(item, 0))
        print(f"{workload:42}{'project':>10}{'plain':>10}{'more':>10}")
        for item in items:
            one, other = ours.get(item, 0.0), plain.get(item, 0.0)
            print(f"  {item:40}{one:10.0f}{other:10.0f}{one - other:+10.0f}")
        print(f"  {'all':40}{sum(ours.values()):10.0f}{sum(plain.values()):10.0f}", flush=True)


def main() -> None:
    """The command line."""
    requested = harness.arguments(__doc__, None, DIGITS, steps=100)
    with harness.prepared() as project:
        tables(project, requested.only, requested.steps)


if __name__ == "__main__":
    main()
