"""A profile of some steps by torch.profiler: what each operation took, for chrome://tracing or Perfetto."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from ..base.files import durable
from ..core.errors import UserError
from ..core.observer import Observer, View
from ..core.ranks import World
from ..record import names

SILENT = "99"  # torch's profiler prints lines of its own below


def steps_of(text: str, steps: int) -> range:
    """The steps that `trace.profile` names, such as 10:13 for steps 10, 11 and 12; none where it is empty.

    Raises:
        UserError: a run of so many `steps` does not have all of them.
    """
    first, _, stop = (text or "0:0").partition(":")
    if int(stop) > steps:
        raise UserError(f"--profile {text}: this run has {steps} steps, 0:{steps} at most wanted")
    return range(int(first), int(stop))


class Profile(Observer):
    """Records the steps from the first to the last one that is asked for, on this rank; its failure ends no run."""

    name = "profile"
    vital = False

    def __init__(self, steps: range, out: Path, world: World) -> None:
        self._steps, self._path, self._world = steps, out / names.rank_profile(world.rank), world
        self._profile: profile | None = None
        self._step = ExitStack()

    def begin_step(self, view: View) -> None:
        """Begin with the first of the steps, or with the one from which the run goes on."""
        if view.step not in self._steps:
            return
        if not self._profile:
            os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
            gpu = [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profile.start()
        self._step.enter_context(record_function(f"step {view.step}"))

    def end_step(self, view: View, sums: Sequence[int], own: Sequence[float]) -> None:
        """Write the file after the last one."""
        self._step.close()
        if view.done >= self._steps.stop:
            self._write()

    def close(self, error: BaseException | None) -> None:
        """Write what there is of a run that ends early."""
        self._step.close()
        self._write()

    def _write(self) -> None:
        if not self._profile:
            return
        held, self._profile = self._profile, None
        held.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with durable(self._path) as beside:
            held.export_chrome_trace(str(beside))
