"""A training of several ranks, one of which is at fault.

`Faulty` starts ranks with this file instead of `-m <package>.train`; each then runs what stands at the end:
the fault, where it is its turn, and the same training.

    tests/faulty.py FAULT RANK FOLDER <package> ARGUMENTS-OF-TRAIN      RANK: a number, or `all`
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import reduce, wraps
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from warm import GRACE, Warm, forget_tests

EVERY = "all"  # ranks
FLIPPED_AFTER = 7  # steps
WRONG_FROM = 18  # the gradient that counts of the first micro-batch that rank 1 of 2 computes twice, micro-batch 4
SECOND_EPOCH = 23  # the first step behind the first epoch's end
WRONG_SHARD = 30  # the shard of a gradient, of those that rank 1 of 2 is given, that is wrong: neither first nor last


def flip(tensor: Any, bit: int = 12) -> None:
    """Change one bit of the largest element: a zero could round to the zero that it was."""
    import torch

    tensor.detach().view(-1).view(torch.int32)[tensor.abs().argmax()] ^= 1 << bit


def library(package: str) -> None:
    """Another version of numpy, as far as anybody can see."""
    import numpy

    numpy.__version__ = "0.0.1"


def variable(package: str) -> None:
    """A variable that may change bits on a GPU."""
    os.environ["NCCL_ALGO"] = "Ring"


def code(package: str) -> None:
    """The project in the folder that OTHER names."""
    for name in [name for name in sys.modules if name.partition(".")[0] in (package, "samebits")]:
        del sys.modules[name]
    os.chdir(os.environ["OTHER"])
    sys.path[:0] = [str(Path("vendor").resolve())]


def arguments(package: str) -> None:
    """More arguments, those in ARGUMENTS."""
    sys.argv += os.environ["ARGUMENTS"].split()


def initial_weights(package: str) -> None:
    """One bit of the first weights."""
    head_built(package, lambda head: flip(head.weight))


def weights(package: str) -> None:
    """A bit in memory flips between two steps."""
    import torch

    step, done = torch.optim.AdamW.step, 0

    @wraps(step)
    def stepped(self: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal done
        result, done = step(self, *arguments), done + (len(self.param_groups) > 1)  # not what is tried on one vector
        if done == FLIPPED_AFTER:
            flip(self.param_groups[0]["params"][-1])
        return result

    torch.optim.AdamW.step = stepped  # type: ignore[method-assign]


def head_built(package: str, hook: Callable[[Any], object]) -> None:
    """Have `hook` called with the last layer of each network that is built."""
    model = import_module(f"{package}.model")
    built = model.build

    def build(*arguments: Any) -> Any:
        network = built(*arguments)
        hook(network.head)
        return network

    model.build = build


def wrong_at(call: int) -> Callable[[Any], Any]:
    """A function that copies gradients, with a bit flipped in this call of it, counted from 1."""
    calls = count(1)

    def copied(correct: Any) -> Any:
        other = correct.clone()
        if next(calls) == call:
            flip(other)
        return other

    return copied


def gradient(package: str) -> None:
    """The hardware miscalculates one gradient once."""
    wrong = wrong_at(WRONG_FROM)
    head_built(package, lambda head: head.weight.register_hook(wrong))


def output_gradient(package: str) -> None:
    """The same where weights are sharded: in what reaches the last layer; each step has five passes, one of them twice.

    Step 4 makes that of micro-batches 4 and 5 twice, after two others; the second time counts.
    """
    wrong = wrong_at(4 * 5 + 4)

    def watch(module: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(wrong)

    head_built(package, lambda head: head.register_forward_hook(watch))


def shard(package: str) -> None:
    """The same in the shard of a gradient that the optimizer is given; where tensors are unsharded, nothing."""
    held = import_module("samebits.core.shards").Shard
    of, wrong = held.of, wrong_at(WRONG_SHARD)
    held.of = lambda self, local: of(self, wrong(local) if local.numel() else local)


def all_reduce(package: str) -> None:
    """The backend's all-reduce adds the gradients of the ranks, as it does for DistributedDataParallel."""
    for owner, name, value in import_module("worlds").backend():
        setattr(owner, name, value)


def evaluation(package: str) -> None:
    """An evaluation forgets to leave the running statistics alone."""
    module = import_module(f"{package}.evaluate")
    metrics = module.metrics

    def measured(model: Any, *arguments: Any) -> Any:
        result = metrics(model, *arguments)
        for buffer in model.buffers():
            buffer.mul_(2)
        return result

    module.metrics = measured


def second_epoch(package: str) -> None:
    """What a loop sets as the second epoch begins: a process that goes on behind that lacks it."""
    import torch

    step, seen = import_module("samebits.core.step").Step, list[int]()
    backward, stepped = step.backward, torch.optim.AdamW.step

    def passed(self: Any, *arguments: Any) -> Any:
        seen.append(self.number)
        return backward(self, *arguments)

    @wraps(stepped)
    def changed(self: torch.optim.AdamW, *arguments: Any) -> Any:
        result = stepped(self, *arguments)
        if SECOND_EPOCH - 1 in seen and seen[-1] >= SECOND_EPOCH:
            flip(self.param_groups[0]["params"][-1])
        return result

    step.backward = passed
    torch.optim.AdamW.step = changed  # type: ignore[method-assign]


def observer(package: str) -> None:
    """An observer that refuses the first step, in the event that OTHER names."""
    run, observer = import_module("samebits.run"), import_module("samebits.core.observer")

    def refuse(self: Any, view: Any, *counted: Any) -> None:
        raise import_module("samebits.core.errors").UserError("planted: no")

    run.ADDED.set(
        run.Added([type("Planted", (observer.Observer,), {"name": "planted", os.environ["OTHER"]: refuse})()])
    )


def unseen(package: str) -> None:
    """This rank sees another disk than rank 0."""
    run = import_module("samebits.run")
    seen_by_all = run.seen_by_all
    run.seen_by_all = lambda folder, world: seen_by_all(folder / "elsewhere", world)


def no_room(package: str) -> None:
    """This rank's part of the second checkpoint has no room."""
    module, calls = import_module("samebits.checkpoint.checkpoint"), count(1)
    write_part = module.write_part

    def written(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        return write_part(*arguments)

    module.write_part = written


def dies(package: str) -> None:
    """SIGKILL as this rank writes its second checkpoint, at the call that OTHER names: MODULE FUNCTION NUMBER."""
    name, path, number = os.environ["OTHER"].split()
    *owners, function = path.split(".")
    owner: Any = reduce(getattr, owners, import_module(f"samebits.{name}"))
    original, calls, looks = getattr(owner, function), count(1), count(1)
    state = import_module("samebits.core.state").State
    look = state.look

    def looked(*arguments: Any) -> Any:
        if next(looks) == 2:
            setattr(owner, function, called)
        return look(*arguments)

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    state.look = looked


def remembers(package: str) -> None:
    """The last layer is scaled by what this process has counted."""
    calls = count(1)
    head_built(package, lambda head: head.register_forward_hook(lambda module, given, output: output * next(calls)))


def nothing(package: str) -> None:
    """No fault."""


class Faulty:
    """One run to its end: what it told, each rank's exit code, and how many steps it recorded."""

    def __init__(
        self,
        package: str,
        folder: Path,
        fault: str,
        at: int | str,
        ranks: int,
        *settings: str,
        grace: float = GRACE,
        **env: str,
    ) -> None:
        self.out = folder / "run"
        (folder / "codes").mkdir(parents=True)
        sets = [text for setting in ("train.epochs=1", *settings) for text in ("--set", setting)]
        arguments = [fault, str(at), str(folder / "codes"), package, *sets, "--out", str(self.out)]
        logs = {"out": folder / "out", "err": folder / "err"}
        self.code = Warm(*arguments, **logs, ranks=ranks, env=env, script=Path(__file__), grace=grace).wait()
        self.message = logs["err"].read_text()
        self.codes = {int(path.name): path.read_text() for path in (folder / "codes").iterdir()}

    def steps(self) -> int:
        """How many steps the run directory has recorded."""
        path = self.out / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.is_file() else []
        return len({json.loads(row)["step"] for row in rows})

    def lines(self, first: str) -> list[list[str]]:
        """The lines that begin with a word, as columns."""
        columns = (line.split() for line in self.message.splitlines())
        return [line for line in columns if line and line[0] == first]


if __name__ == "__main__":
    chosen, at, codes, package, *rest = sys.argv[1:]
    rank, code_left = os.environ.get("RANK", "0"), "0"
    sys.argv = ["samebits", "train", *rest]
    import_module("samebits.loader").cover(package)  # as the command does, before anything is planted
    if at in (rank, EVERY):
        for fault in chosen.split("+"):
            globals()[fault](package)
    forget_tests()
    try:
        runpy.run_module("samebits", run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code_left = str(left.code or 0)
        raise
    except BaseException as error:
        code_left = type(error).__name__
        raise
    finally:
        Path(codes, rank).write_text(code_left)
