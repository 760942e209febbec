"""The trace: a chain of digests, one row per step, that says what happened.

    trace/steps.bin       a row for each sum of a step, as a rule one: batch, loss, gradient and, now and then, weights
    trace/tensors.bin     level `tensor`: such rows with a digest for each column of tensors.json
    trace/rank0000.jsonl  what differs between ranks by nature: host, time spent in each phase; and, at level
                          `tensor` for rank 0, numbers to look at: mean, deviation and largest of the weights
    trace/values.safetensors  the tensors of the one step that `trace.values` names, as rank 0 saw them; the batches
                              and outputs of others lie beside it, such as in values0001.safetensors

Every quantity in a row is the same on any world size: it is summed over micro-batches as an integer, or computed
from what all ranks hold. So is the trace root, the hash at the end of the last row of steps.bin.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..base.files import write_json
from ..core.digest import combined_digests, held_digests, mix, tensor_digest
from ..core.errors import RunError
from ..core.observer import Ballot, Observer, View
from ..core.ranks import World
from ..core.shards import Held, moved, unsharded
from ..core.state import State
from ..record import names
from ..record.chain import HAS_WEIGHTS, STEP, SUM, WORDS, Chain, rows_of
from .tensors import Kept
from .timings import Timings

WEIGHTS_EVERY = 10  # steps between weights digests: a constant, so that no setting can change the root


class Trace(Observer):
    """Turns what happens in each step into rows. Level `off` makes none.

    Digests are read from the device one step late.
    """

    name = "trace"

    def __init__(self, level: str, folder: Path, world: World, values: int = -1) -> None:
        self.level, self.folder, self.world = level, folder, world
        self.kept = Kept(values if level != "off" else -1, folder / names.rank_values(world.rank))
        self._modules: list[str] = []
        self._hooks: list[RemovableHandle] = []
        self._steps: Chain | None = None
        self._tensors: Chain | None = None
        self._pending: Callable[[], None] | None = None

    def begin(
        self, state: State, done: int, outputs: bool, sharded: bool = False, first: int = 0, anew: bool = False
    ) -> None:
        """Start the trace, or go on with it after `done` steps; at level `tensor` with the modules' `outputs`, too.

        The steps before `first`, if that is known, are another run's. Rows of later steps than `done` must come again
        as they are, or are written `anew`.

        Where gradients, and perhaps more, are `sharded` over the ranks, all ranks work at the digests together.

        Raises:
            UserError: the trace of those steps is not there.
        """
        self._sharded, self._names = sharded, [*state.parameters]
        if self.level == "off":
            return
        if outputs and (self.level == "tensor" or self.kept.step >= 0):
            watched, self._hooks = _watch(state.model, self._output)
            self._modules = watched if self.level == "tensor" else []
        (self.folder / names.TRACE).mkdir(parents=True, exist_ok=True)
        self._timings = Timings(self.folder / names.rank_rows(self.world.rank), self.world.rank, self.world.device)
        if self.world.is_main:
            position = rows_of(self.folder / names.STEP_ROWS, done, first)
            self._steps = Chain(self.folder / names.STEP_ROWS, STEP.itemsize, position, WORDS, anew)
            if self.level == "tensor":
                columns = [
                    *(f"output {name}" for name in self._modules),
                    *(f"gradient {name}" for name in self._names),
                    *(f"weights {name}" for name in state.weights()),
                    *(f"optimizer {name}" for name in self._names),
                ]
                write_json(self.folder / names.TENSOR_COLUMNS, columns)
                self._tensors = Chain(self.folder / names.TENSOR_ROWS, 8 * len(columns), position, columns, anew)
        self.sums = self._width = 1 + len(self._modules)
        self._timings.begin()

    def begin_step(self, view: View) -> None:
        """Nothing of the step is seen yet."""
        if self.level == "off":
            return
        self._own: list[Tensor] = []  # of each sum: this rank's terms of digests, of the batch and of outputs
        self._all: list[list[Tensor]] = []  # of each sum: the digests that all ranks hold alike, of loss and gradients
        self._outputs: dict[str, list[Tensor]] = {}
        self._values: dict[str, list[Tensor]] = {}
        self.kept.begin(view.step)

    def _output(self, name: str | None, value: Tensor | None) -> None:
        if name is None:
            self._outputs, self._values = {}, {}  # the model begins, perhaps for the second time for this micro-batch
        elif value is not None:
            if self.level == "tensor":
                self._outputs.setdefault(name, []).append(tensor_digest(value))
            if self.kept.active:
                # a copy: the next module may work in place
                self._values.setdefault(name, []).append(value.detach().clone())

    def batch(self, view: View) -> None:
        """Take in the tensors of a micro-batch that the model is about to see."""
        if self.level == "off":
            return
        if view.number == len(self._own):  # the first one of a sum
            self._own.append(torch.zeros(self._width, dtype=torch.int64, device=self.world.device))
            self._outputs, self._values = {}, {}  # of no micro-batch
            self._batches: dict[int, Sequence[Tensor]] = {}
            self._again = f", sum {view.number}" if view.number else ""
        else:
            self._take_outputs()
        self._timings.ends("load")
        self._micro_batch = view.leaf
        self._batches[view.leaf] = view.batch  # digested together at the end of the sum
        where = f"micro-batch {view.leaf}{self._again}"
        named = {f"batch {place}, {where}": tensor for place, tensor in enumerate(view.batch)}
        self.kept.take(named)

    def _take_outputs(self) -> None:
        for place, name in enumerate(self._modules, start=1):
            for call, digest in enumerate(self._outputs.get(name, []), start=1):
                self._own[-1][place] += mix(mix(digest, call), self._micro_batch + 1)
        for name, values in self._values.items():
            output = f"output {name}, micro-batch {self._micro_batch}{self._again}"
            shown = {f"{output}, call {n}": value for n, value in enumerate(values, 1)}
            self.kept.take(shown)
        self._outputs, self._values = {}, {}

    def gradients(self, view: View) -> None:
        """Take in the reduced gradients and the mean loss; the same on every rank."""
        if self.level == "off":
            return
        self._take_outputs()
        self._timings.ends("compute")
        digests = combined_digests(list(self._batches.values()))
        places = torch.tensor([micro_batch + 1 for micro_batch in self._batches]).to(digests.device, non_blocking=True)
        self._own[-1][0] = mix(digests, places).sum()
        self.sums = self._width * len(self._own)
        assert view.loss is not None
        if self.kept.active:
            held = {"loss": view.loss} | _whole(view.gradients(), "gradient")
            self.kept.take({name + self._again: tensor for name, tensor in held.items()})
        if self.world.is_main or self._sharded:
            gradients = view.gradients()
            self._all.append([view.loss.detach().view(torch.int64), *held_digests([[*gradients.values()]])])
            if self.level == "tensor":
                groups = [[gradients[name]] if name in gradients else [] for name in self._names]
                self._all[-1] += self._digests(groups)

    def ballot(self, view: View) -> Ballot:
        """This rank's terms of the digests that are summed over the ranks."""
        if self.level == "off":
            return Ballot()
        return Ballot(sums=self._own[0] if len(self._own) == 1 else torch.cat(self._own))

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Record the step.

        Raises:
            RunError: this step, or the one before it, was recorded with other digests, before an interruption.
        """
        if self.level == "off":
            return
        self.flush()
        looked = self._tensors and not self._sharded  # a rank that holds shards would tell numbers of these alone
        groups = {"groups": [_numbers(group) for group in view.groups()]} if looked else {}
        self._timings.write(view.step, **groups)
        if self.kept.active:
            if self.world.is_main or self._sharded:
                self.kept.take(_whole(view.weights(), "weights"))
            self.kept.save(self.world.is_main)
        if self.world.is_main or self._sharded:
            weights = view.step % WEIGHTS_EVERY == 0 or view.is_last
            digests = [digest for digests in self._all for digest in digests]
            digests += held_digests([list(view.weights().values())]) if weights else []
            if self.level == "tensor":
                held = [*([weight] for weight in view.weights().values()), *view.state().values()]
                digests += self._digests(held)
            if self._steps:
                self._pending = partial(self._write, view.step, len(self._all), sums, weights, torch.stack(digests))
                if self._steps.repeats or view.stops:
                    self.flush()  # what is made again is compared before anything comes of it
        self._timings.begin()

    def close(self, error: BaseException | None) -> None:
        """The modules' outputs are not looked at any more; after a failure the last complete step is written."""
        for hook in self._hooks:
            hook.remove()
        if isinstance(error, RunError):
            with suppress(RunError):
                self.flush()

    def _digests(self, groups: Sequence[Sequence[Held]]) -> list[Tensor]:
        here = [[moved(held, self.world.device) for held in group] for group in groups]
        return [digest.to(self.world.device) for digest in held_digests(here)]

    def _write(self, step: int, count: int, sums: Sequence[int], weights: bool, digests: Tensor) -> None:
        """The rows of a step that has made so many sums; weights, and what belongs to them, stand in the last one."""
        numbers = [number % 2**64 for number in digests.tolist()]
        width = 2 + (len(self._names) if self.level == "tensor" else 0)
        of_sums, rest = numbers[: count * width], numbers[count * width :]
        weights_digest = rest.pop(0) if weights else 0
        assert self._steps
        for number in range(count):
            loss, gradient, *gradients = of_sums[number * width : (number + 1) * width]
            batch, *outputs = (term % 2**64 for term in sums[number * self._width : (number + 1) * self._width])
            last = number == count - 1
            flags = number << SUM | HAS_WEIGHTS * (weights and last)
            row = (step, flags, batch, loss, gradient, weights_digest if last else 0)
            self._steps.append(np.array(row, STEP).tobytes(), step)
            if self._tensors:
                held = rest if last else [0] * len(rest)
                self._tensors.append(np.array([*outputs, *gradients, *held], "<u8").tobytes(), step)

    def flush(self) -> None:
        """Write the row that is still on the device."""
        if self._pending:
            self._pending()
            self._pending = None

    def sync(self) -> None:
        """Return once all written rows are on the disk."""
        for chain in (self._steps, self._tensors):
            if chain:
                chain.sync()

    @property
    def root(self) -> str | None:
        """The hash of all steps so far; None where none are traced."""
        return self._steps.root if self._steps else None


def _whole(named: Mapping[str, Held], kind: str) -> dict[str, Tensor]:
    return {f"{kind} {name}": unsharded(held) for name, held in named.items()}


def _numbers(parameters: Sequence[Tensor]) -> dict[str, float]:
    """Mean, standard deviation and largest magnitude over all numbers of a group of parameters."""
    flat = torch.cat([parameter.detach().flatten().double() for parameter in parameters])
    numbers = torch.stack([flat.mean(), flat.std(correction=0), flat.abs().max()]).tolist()
    return dict(zip(("mean", "std", "max"), numbers, strict=True))


def _watch(
    model: nn.Module, take: Callable[[str | None, Tensor | None], None]
) -> tuple[list[str], list[RemovableHandle]]:
    """Have `take` called with (None, None) when the model begins and with each leaf's output; the leaves' names."""

    def begins(module: nn.Module, inputs: Any) -> None:
        if module.training:
            take(None, None)

    def ends(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training and isinstance(output, Tensor):
            take(name, output)

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(partial(ends, name)) for name, module in leaves]
    return [name for name, _ in leaves], [model.register_forward_pre_hook(begins), *hooks]
