"""Train all loops of ordinary.py, each in several ways.

    ordinary_ways.py <package> FOLDER KEY=VALUE …

One process trains each loop straight, with a stop after its second step, and resumed; those of REPLACED once more with
the optimizers that the remedy names. Ranks train each one straight. The first rank writes FOLDER/ended.json: what each
loop gave and printed, or why it was refused, by the way in which it was trained.
"""

import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ordinary import LOOPS

REPLACED = {  # the loops that are told to use another optimizer: the one that they have, and the other one
    "nanogpt_like": ("AdamW", "AdamW"),
    "curriculum": ("RMSprop", "AdamW"),
    "multi_task": ("NAdam", "AdamW"),
    "frozen_backbone": ("Adagrad", "Adagrad"),
}


def stopping(steps: Callable[..., Iterator[Any]], run: Any) -> Callable[..., Iterator[Any]]:
    """The steps of a run, with SIGTERM in the second one."""

    def until(*given: Any, **named: Any) -> Iterator[Any]:
        for step in steps(*given, **named):
            yield step
            run._stop.came = step.number == 1  # all that the handler does

    return until


def replaced(had: str, other: str) -> AbstractContextManager[Any]:
    """The optimizer that the loop has is another one, with fused=True."""
    return mock.patch.object(torch.optim, had, partial(getattr(torch.optim, other), fused=True))


def main(package: str, folder: Path, overrides: list[str]) -> None:
    """Train all loops in all ways."""
    project = import_module("samebits.base.project").Project.at(Path.cwd())
    run_of, params, errors = (import_module(f"samebits.{name}") for name in ("run", "config.params", "core.errors"))
    config = params.load(import_module(f"{package}.config").Config, overrides=overrides)
    ways = ("whole",) if "RANK" in os.environ else ("whole", "stopped", "resumed", "as told")
    ended: dict[str, dict[str, Any]] = {way: {} for way in ways}
    for number, (name, loop) in enumerate(LOOPS.items()):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each has a process group of its own
        for way in ways if name in REPLACED else ways[:3]:
            out = folder / ("stopped" if way == "resumed" else way) / name
            said, failure = io.StringIO(), ""
            try:
                with redirect_stderr(said), suppress(errors.Preempted), run_of.Run(project, config, out) as run:
                    if way == "stopped":
                        run.steps = stopping(run.steps, run)
                    with replaced(*REPLACED[name]) if way == "as told" else nullcontext():
                        loop(run)
            except Exception as error:
                failure = repr(error)
            files = [out / file for file in ("model.safetensors", "metrics.json", "trace/steps.bin")]
            kept = [file for file in files if way != "stopped" and run.world.is_main and file.exists()]
            digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in kept]
            ended[way][name] = {"failure": failure, "told": said.getvalue().splitlines(), "digests": digests}
    if run.world.is_main:
        (folder / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
