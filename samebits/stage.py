"""What the function of a stage is given, and the evaluation of a dataset in it, be it in a training or after it."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from .address import loaded
from .base.project import Project
from .config.settings import Settings
from .core import evaluation, flags, ranks, sampling
from .core.plan import Indexed
from .core.ranks import World
from .guards import opened, stages
from .guards.still import Still

Collate = Callable[[list[Any]], Any]
C = TypeVar("C", bound=Settings)
LONGEST = 107 - len("/pymp-12345678/listener-12345678")  # bytes of TMPDIR, where multiprocessing makes its sockets


class Stage(Generic[C]):
    """What the function of a stage is given.

    Attributes:
        config: the checked config, an instance of the owner's `Config`.
        out: the run directory.
        world: this process's rank, the world size and the device.
    """

    world: World

    def __init__(self, project: Project, config: C, out: Path, world: World | None = None) -> None:
        self.project, self.config, self.out = project, config, out
        if world:
            self.world = world

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    def _settle(self) -> None:
        """Return once no thread of the library is at work, so that this process can be forked."""

    def _making(self) -> AbstractContextManager[object]:
        """Return the context in which this process makes samples."""
        return nullcontext()


def evaluating(
    model: nn.Module, dataset: Indexed, stage: Stage[Any], *, batch: int, collate: Collate | None = None
) -> AbstractContextManager[Iterator[tuple[int, Any]]]:
    """Give this rank's part of `dataset`: pairs of a batch's number and the batch, of at most `batch` samples.

    The dataset is cut into the same batches on any world size, and the ranks take turns: `sums` adds up over them. The
    model is in evaluation mode and without gradients inside. Transforms and modules may draw: each sample and each
    batch is seeded. After it every module is in the mode that it had, and the generators go on where they were.

    `loader.workers` processes make the samples, or this one where that is 0; `collate` is that of `run.steps`.
    """
    return evaluation.evaluating(model, dataset, batch, loading(stage, collate))


def sums(
    measure: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]],
    model: nn.Module,
    dataset: Indexed,
    stage: Stage[Any],
    *,
    batch: int,
    collate: Collate | None = None,
) -> dict[str, torch.Tensor]:
    """The sums over `dataset` of what `measure(model, batch)` returns for each batch: tensors by their names.

    Every rank gets those of all batches, of at most `batch` samples each, the same on any world size. Whole numbers and
    truths are added as int64, floating-point numbers as float64. Modes, seeds and batches are those of `evaluating`.

    Raises:
        UserError: `measure` returns something else, or tensors of another shape than before; or there is no sample.
    """
    return evaluation.sums(measure, model, dataset, batch, loading(stage, collate))


def loading(stage: Stage[Any], collate: Collate | None) -> sampling.Loading:
    """How samples are loaded: each worker compares its code, and files that samples open are looked at."""
    _fit_sockets()
    begin_worker = partial(loaded.require_same, loaded.begun())
    functions = begin_worker, opened.require_known, collate, stage._settle, stage._making
    return sampling.Loading(stage.config.options, stage.world, *functions)


def _fit_sockets() -> None:
    """Have sockets made in /tmp where Linux would refuse their names below TMPDIR, as Python 3.14 does.

    Else a loader worker would send nothing, and be waited for.
    """
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        with suppress(OSError):
            util.get_temp_dir()  # it keeps the first one, also for processes that this one starts
        tempfile.tempdir = before


def alone(config: Settings) -> World:
    """The world of a stage that is one process, such as an evaluation. It sets the flags and checks the data.

    Raises:
        UserError: the prepared data is missing or altered, or there is no such device.
    """
    flags.apply(config.options.determinism)
    still = Still(config.data)
    let_read(still.manifest, config)
    stages.hold(still.require)
    return World(0, 1, ranks.device_of(config.device))


def let_read(data: Mapping[str, Any], config: Settings) -> None:
    """Let the code open the dataset itself, if the manifest says that a run reads it: then it has been checked."""
    if data.get("raw"):
        opened.know(Path(config.data.raw))
