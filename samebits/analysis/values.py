"""How much two runs differ at a step: the step is made again in both, from the nearest checkpoint of each."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..base.files import require
from ..base.project import Project
from ..core.errors import Preempted, RunError, UserError
from ..prove.again import interrupted
from ..record import receipt
from ..record.names import ADDRESS, METRIC_ROWS, RECEIPT, RUN, TRACE, VALUES
from ..record.reading import Identity, read_record
from ..record.view import RunView
from ..start import trainings
from ..trace import tensors
from .replay import remade
from .trust import Trust, require_trusted

SHOWN = 3
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Recorded:
    """A run that is to be made again: its directory, its id, what its record or its receipt states, and its patch."""

    run: Path
    id: str
    made: Mapping[str, Any]
    patch: Path | None


def recorded(project: Project, run: Path, trust: Trust, report: Callable[[str], None]) -> Recorded:
    """The record of a run, as its receipt states it where there is one.

    Raises:
        UserError: there is no such run, its record has another form, or it brings code along that nobody allowed.
        RunError: the receipt or the patch was altered, or the signature is another's.
    """
    view = RunView(run)
    if not view.facts:
        raise UserError(f"{run / RUN}: missing; the values of a step are made again from a run directory")
    require(view.facts["id"], f"{run / RUN}: id", Identity, "")
    finished = view.holds(RECEIPT)
    made = view.required.stated if finished else {**view.facts, **read_record(run, ADDRESS)}
    patch = receipt.patch_beside(run / (RECEIPT if finished else RUN), made["code"]["patch"])
    require_trusted(project, run / RECEIPT, patch, trust, report)
    return Recorded(run, view.facts["id"], made, patch)


def at(project: Project, recorded: Recorded, step: int, report: Callable[[str], None]) -> dict[str, Tensor]:
    """The tensors of a step (counted from 0) of a run, in the order in which they came to be.

    Raises:
        UserError: there is no way to make its step again.
        RunError: the re-run gives other digests than recorded, or does not reach the step.
    """
    run, made = recorded.run, recorded.made
    with (
        _copied(run, step) as (out, done),
        remade(project, recorded.id, made, recorded.patch, report) as (again, keys),
    ):
        keys |= {"trace.level": made["config"]["trace.level"], "trace.values": step}
        keys |= {"tracking.enabled": False, "checkpoint.every": 10**9}
        report(f"making step {step} of {run} again, from the checkpoint after step {done}")
        ranks = made["preimage"].get("world_size", 1)
        words = trainings.command("train", keys, "--out", out, ranks=ranks)
        trainings.run(again, words, ends=(0, Preempted.exit_code) if ranks == 1 else (0, 1))
        if not (out / VALUES).is_file():
            raise RunError(f"{run}: the re-run did not come to step {step}")
        return dict(tensors.read(out))


@contextmanager
def _copied(run: Path, step: int) -> Iterator[tuple[Path, int]]:
    """The run as if it had been interrupted at its newest checkpoint before the step; and how many steps that has."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "run")
        done = interrupted(run, out, step)
        shutil.copyfile(run / METRIC_ROWS, out / METRIC_ROWS)
        shutil.copytree(run / TRACE, out / TRACE)
        yield out, done


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor], phase: str) -> list[str]:
    """The first tensors of a phase that differ, each with by how much."""
    names = [name for name in one if name in other and name.startswith(phase)]
    differing = tensors.ordered([name for name in names if _bits(one[name]).ne(_bits(other[name])).any()], phase)
    more = [f"and {len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
    return [f"{name}: {how_much(one[name], other[name])}" for name in differing[:SHOWN]] + more


def how_much(one: Tensor, other: Tensor) -> str:
    """How many numbers differ and by how much at most: absolute, relative to the larger one, and in ULPs."""
    apart = _bits(one) != _bits(other)
    a, b = one.double(), other.double()
    absolute = torch.where(apart, (a - b).abs(), 0)
    relative = torch.where(apart, absolute / torch.maximum(a.abs(), b.abs()).clamp_min(5e-324), 0)
    worst = int(torch.where(apart, absolute.nan_to_num(torch.inf), -1).argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(worst), one.shape)]
    ulps = f", {int(_ulps(one, other).max())} ULPs" if one.is_floating_point() else ""
    return (
        f"{int(apart.sum())} of {apart.numel()} numbers differ, by at most {float(absolute.max()):.3g} "
        f"(relative {float(relative.max()):.3g}{ulps}); most at {where}: "
        f"{one.flatten()[worst].item()!r} | {other.flatten()[worst].item()!r}"
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(WHOLE[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _ulps(one: Tensor, other: Tensor) -> Tensor:
    """How many representable numbers lie from one to the other, both zeros being one; beyond 2**53 rounded."""
    bits, others = _bits(one).long(), _bits(other).long()
    largest = torch.iinfo(_bits(one).dtype).max
    these, those = bits & largest, others & largest  # the numbers from zero
    across = these.double() + those.double()
    return torch.where((bits < 0) == (others < 0), (these - those).abs().double(), across)


def lines(
    project: Project, runs: tuple[Path, Path], step: int, phase: str, trust: Trust, report: Callable[[str], None]
) -> list[str]:
    """The lines that say by how much two runs differ at a step, from the phase in which they part.

    Raises:
        RunError: a run has no record from which it may be made again; see `recorded`.
    """
    seen: list[dict[str, Any]] = []
    for side in [recorded(project, run, trust, report) for run in runs]:
        try:
            seen.append(at(project, side, step, report))
        except RunError as failure:
            return [f"no values: {side.run} made again: {failure}"]
    return [f"values at step {step}, {phase}:", *(f"  {line}" for line in differences(seen[0], seen[1], phase))]
