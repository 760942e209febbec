"""Trains parts of a run again, one at a time, in a fresh process, and compares each with what the run has recorded."""

import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL

from ..base.project import Project
from ..base.shape import plain
from ..config.settings import Settings
from ..record.names import PROOF, RUN
from ..record.reading import read_record
from ..start import trainings
from ..start.ranks import STOPPED
from . import again, setting
from .again import Difference
from .choice import Choice
from .fresh import Fresh
from .segments import Segment

LINE = 200  # characters of what a segment said, or of a name
QUIET = {
    "tracking.enabled": False,
    "record.progress": False,
    "checkpoint.every": 10**9,
    "trace.profile": "",
    "receipt.key": "",
    "prove.when": "never",
}


class Trainer:
    """Trains segments of the run in `out` again, in the circumstances in which its process was started.

    Attributes:
        run: the folder of the segment that it has trained last.
        not_tried: circumstances that stay as they are, each with the reason.
        varying: names of logged numbers that were others than in the run.
    """

    def __init__(self, project: Project, config: Settings, out: Path) -> None:
        self._project, self._config, self._out = project, config, out
        self._is_traced = config.trace.level != "off"
        self._stack = ExitStack()
        self._process: Fresh | None = None
        self._folder = out / PROOF
        self.run = self._folder / "run"
        self.not_tried: dict[str, str] = {}
        self.varying: set[str] = set()

    @property
    def is_started(self) -> bool:
        """Whether there is a process that trains."""
        return self._process is not None

    def start(self, rows: Sequence[setting.Row]) -> Iterator[None]:
        """Start a fresh process in these circumstances that forks trainings, of the project elsewhere."""
        self.close()
        changed = QUIET | {"trace.level": "step" if self._is_traced else "off"}
        fresh = Fresh(self._project, self._config, changed, self._folder / "project", rows)
        self._process = self._stack.enter_context(fresh)
        while not fresh.has_begun:
            yield
        self.not_tried = fresh.not_tried

    def compared(
        self, segment: Segment, choice: Choice, patience: int, ends: bool = False, values: int = -1
    ) -> Generator[None, None, tuple[str, Difference | None]]:
        """Train a segment on ranks that wait so many seconds for each other; one that `ends` the run, to its very end.

        The tensors of the step `values` are kept. Returns why the segment did not come to its end, and what differs.
        """
        fresh = self._process
        assert fresh
        out, log = self.run, self._folder / "log"
        shutil.rmtree(out, ignore_errors=True)
        log.unlink(missing_ok=True)
        again.interrupted(self._out, out, segment.first)
        if self._is_traced:
            again.cut(self._out, out, segment)
        keys = choice.keys() | {"parallel.timeout_seconds": patience, "trace.values": values}
        words = [str(segment.stop + ends), "--out", str(out), *trainings.overrides(keys)]
        process = fresh.start(trainings.REPEATED, words, log, choice.ranks)
        while (code := process.poll()) is None:
            yield
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        said = fresh.without_place(plain(lines[-1]))[:LINE] if lines else ""
        if not again.is_done(out, segment):
            if difference := again.disagreement(segment, "\n".join(lines)):
                return "", difference
            if code == -SIGKILL:
                return f"it ended with {code}: out of memory, if nobody sent SIGKILL", None
            return said or "it ended without a word", None
        states = read_record(self._out, RUN).get("states", {})
        difference = again.difference(self._out, out, segment, states, ends)
        if difference and difference.here == again.NONE and code not in (0, STOPPED):  # what follows the loop failed
            return said or f"it ended with {code}", None
        self.varying |= again.varying(self._out, out, segment)
        return "", difference

    def close(self) -> None:
        """End the process that trains, and remove what it has written."""
        self._stack.close()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
