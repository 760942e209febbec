"""Where the time of a step goes, in the project and in a plain script with its flags: microseconds of CPU time.

python measure/spent.py [--only convnet] [--steps N]

A function is timed without those that are timed within it. The time is the thread's on the CPU, which other work on the
machine changes least. A timer takes about a microsecond itself, and what is called for each sample holds it as often.
"""

import functools
import inspect
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import rank
from rounds import ALWAYS, PINNED, WORKLOADS, harness

DIGITS = [name for name, workload in WORKLOADS.items() if workload.starter == "digits"]
WARM, OTHER = 20, "all else, in Python"
# what is timed -> functions as module:name; those of the project's library without its package
ITEMS: dict[str, tuple[str, ...]] = {
    "forward": (
        *(f"repro_project.model:{network}.forward" for network in ("ConvNet", "Transformer")),
        "torch.nn.functional:cross_entropy",
    ),
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
    "attributes of modules": ("guards.unsaved:UnsavedState.batch", "guards.unsaved:UnsavedState.gradients"),
    "the rest of a step's end": ("core.loop:Loop._end", "core.loop:Loop._report"),
    "updates are watched": ("guards.updates:Updates._check", "guards.updates:Updates.begin_step"),
    "shapes": ("tracking.logged:Shapes._note",),
}


class Spent:
    """Timers that know which one is at work: the time of a function within a function counts once."""

    def __init__(self) -> None:
        self.nanoseconds: Counter[str] = Counter()
        self._stack, self._since = [OTHER], time.thread_time_ns()

    def turn(self) -> None:
        """What was spent since the last turn is of the item at work."""
        now = time.thread_time_ns()
        self.nanoseconds[self._stack[-1]] += now - self._since
        self._since = now

    def timed(self, item: str, function: Any) -> Any:
        """The function with a timer; of a generator, of each of its values."""

        @functools.wraps(function)
        def call(*words: Any, **named: Any) -> Any:
            self.turn()
            self._stack.append(item)
            try:
                found = function(*words, **named)
            finally:
                self.turn()
                self._stack.pop()
            return self._each(item, found) if inspect.isgenerator(found) else found

        return call

    def _each(self, item: str, values: Any) -> Any:
        following = self.timed(item, values.__next__)
        with suppress(StopIteration):
            while True:
                yield following()

    def watch(self) -> None:
        """Time all ITEMS, wherever they were imported to."""
        for item, functions in ITEMS.items():
            for path in functions:
                path = path if path.startswith(("torch", "repro_project")) else f"samebits.{path}"
                outer, _, last = path.rpartition("." if "." in path.partition(":")[2] else ":")
                function = resolve_name(path)
                timed = self.timed(item, function)
                if ":" in outer:  # a method
                    setattr(resolve_name(outer), last, timed)
                    continue
                for names in map(vars, list(sys.modules.values())):
                    if names.get(last) is function:
                        names[last] = timed


class Counted:
    """In place of a pace: so many steps, and what was spent in them."""

    def __init__(self, steps: int, slower: float) -> None:
        self._steps, self._warm, self._step, self._spent = steps, min(WARM, steps), 0, Spent()
        self._spent.watch()  # before hooks are made of the functions

    def begins(self) -> None:
        """A step begins."""
        if self._step == self._warm:
            self._spent.turn()
            self._spent.nanoseconds.clear()
        if self._step == self._warm + self._steps:
            self._spent.turn()
            harness.leave({item: number / 1000 / self._steps for item, number in self._spent.nanoseconds.items()})
            os._exit(0)
        self._step += 1


def spend(script: str, workload: str, steps: int) -> None:
    """Train until that is counted: microseconds per step of each item."""
    rank.Pace = functools.partial(Counted, steps)
    out = f"build/spent-{script}-{workload}"
    sys.argv[1:] = [script, "0", out, *ALWAYS, *WORKLOADS[workload].settings]
    rank.main()


def print_spent(project: Path, workload: str, steps: int) -> None:
    """Print the table of a workload, the largest differences first."""
    ours, plain = (
        Counter(harness.within(project, spend, script, workload, steps, variables=harness.ONE_THREAD))
        for script in ("ours", PINNED)
    )
    print(f"{workload:42}{'project':>10}{'plain':>10}{'more':>10}")
    for item in sorted({*ours, *plain}, key=lambda item: plain[item] - ours[item]):
        print(f"  {item:40}{ours[item]:10.0f}{plain[item]:10.0f}{ours[item] - plain[item]:+10.0f}")
    print(f"  {'all':40}{ours.total():10.0f}{plain.total():10.0f}", flush=True)


def main() -> None:
    """The command line."""
    requested = harness.arguments(__doc__, None, DIGITS, steps=100)
    with harness.prepared() as project:
        for workload in requested.only:
            print_spent(project, workload, requested.steps)


if __name__ == "__main__":
    main()
