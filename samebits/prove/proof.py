"""The proof that a run makes of itself: its segments trained again, each in other circumstances, and compared.

A fresh process has all circumstances changed that must not matter (`setting.ROWS`). Its forks train the segments on
other numbers of ranks and loader workers, and sharded in other ways. Where one differs, `cause` looks for what makes
the difference.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ..base.files import write_json
from ..base.project import Project
from ..checkpoint import checkpoint
from ..config.settings import Settings
from ..core.errors import FULL, Preempted, RunError
from ..record import proved
from ..record.names import CHECKPOINTS, CONTRADICTION, RUN
from ..record.reading import read_record
from ..start import anew, trainings
from . import again, setting, tensor
from .again import Difference
from .cause import FRESH, cause_of
from .choice import Choice, choices
from .fresh import ELSEWHERE
from .room import gpus, places
from .segments import Segment
from .trainer import LINE, Trainer

RANKS = "number of ranks"
PAUSE = 0.02  # seconds between two looks at a segment
MOST = 100  # names
NO_ROOM = re.compile("out of memory|MemoryError|Cannot allocate memory|ended with -9|signal: Killed")
SOON = 20  # seconds after which whoever waits for the proof is shown how far it is
EARLY = 2  # parts, where `prove.when` is early
PATIENCE = 120  # seconds that ranks of a segment wait for each other, beside those that the run has taken so far


class Contradiction(RunError):
    """A part of the run, trained again, has other bits."""


_Lent = Callable[[], AbstractContextManager[None]]
_Found = tuple[Segment, Choice, Sequence[setting.Row], Difference]
OFTEN = "HOME", setting.VARIABLES  # what a part most often cannot do without: weights in ~/.cache, credentials


def _attempts() -> list[Sequence[setting.Row]]:
    """What is changed, then what in its place where no part can be trained so."""
    without = [[row for row in setting.ROWS if row.name != name] for name in OFTEN]
    return [setting.ROWS, *without, [row for row in setting.ROWS if row.become], []]


def unwanted(config: Settings, ranks: int) -> str:
    """Why a run on so many ranks is not to prove itself; empty where it is."""
    if config.prove.when == "never":
        return "prove.when=never"
    if os.environ.get(trainings.PROVE) == "never":
        return f"{trainings.PROVE}=never"
    if config.determinism.relax:
        return f"determinism.relax={json.dumps(config.determinism.relax)}"
    if config.parallel.reduce == "ddp" and ranks > places(config.device):
        return f"parallel.reduce=ddp wants {ranks} ranks again, and they have no room on this host"
    return ""


def again_in_vain(out: Path) -> Contradiction | None:
    """What the run ends with where torchrun starts it again although its proof has failed: it would fail again."""
    if anew.handed() or os.environ.get(anew.COUNT, "0") == "0" or not (out / CONTRADICTION).is_file():
        return None
    return Contradiction(f"{out / CONTRADICTION}: the run contradicts itself, so torchrun starts it again in vain")


class Proof:
    """The proof of the run in `out`, on so many `ranks`, by these segments of it.

    It is made beside the run, a look at a time, and at its end. `stopped` says whether SIGTERM came, `moved` what the
    owner's code holds that has changed and that no checkpoint holds. `lent` gives memory to parts that are waited for.

    Attributes:
        found: what differs, if anything does.
        wants_room: whether the run is to stop for early parts, which have no room beside it, if most of it is left.
    """

    def __init__(
        self,
        project: Project,
        config: Settings,
        out: Path,
        ranks: int,
        segments: Sequence[Segment],
        stopped: Callable[[], bool],
        moved: Callable[[], Sequence[str]] = list,
        lent: _Lent = nullcontext,
    ) -> None:
        self._moved, self._lent = moved, lent
        self._project, self._config, self._out, self._stopped = project, config, out.absolute(), stopped
        self._segments, self._ranks = segments, ranks
        fits = ranks <= places(config.device)  # ranks of other hosts may have no room on this one
        self._own = Choice(ranks if fits else 1, config.loader.workers, config.parallel.shard if fits else "none")
        self._trainer = Trainer(project, config, self._out)
        self._attempts = _attempts()
        self._failed = ""  # what the last attempt that failed said
        self._recorded = 0  # steps of the run that its trace holds
        self._began, self._now = time.monotonic(), ""
        self._refused, self._hangs = False, False
        self._ended = False
        self._work = self._trained(self._beside())
        self._done: dict[Segment, Choice] = {}
        self._changed: list[str] = []
        self._not_tried: dict[str, str] = {}
        self._contradiction: Contradiction | None = None  # of early segments
        self.found: _Found | None = None
        self.wants_room = False

    def _beside(self) -> list[tuple[int, Segment]]:
        """Which segments are trained beside the run, with their numbers: all where a core is free, else early ones."""
        busy = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        is_free = len(os.sched_getaffinity(0)) > busy and not gpus(self._config.device)
        return [*enumerate(self._segments)] if is_free else self._early()

    def _early(self) -> list[tuple[int, Segment]]:
        return [*enumerate(self._segments)][: EARLY if self._config.prove.when == "early" else 0]

    def look(self, recorded: int, left: int = 0) -> bool:
        """See to the segment that is trained, and begin the next one of so many `recorded` steps; some are `left`.

        Returns whether the run is to end, for one differs, or to stop for early ones.
        """
        self._recorded = recorded
        next(self._work, None)
        is_early = left > recorded - self._segments[0].first
        return self.found is not None or (self.wants_room and is_early)

    def handed(self) -> dict[str, Any]:
        """What `early` is given where the run has stopped; short enough for a variable."""
        return {"began": self._began, "moved": [name[:LINE] for name in self._moved()[:MOST]]}

    def early(self, steps: int, began: float, moved: Sequence[str]) -> None:
        """Train the early segments of a run that has stopped for it after so many steps; it began at such a time.

        Those that cannot be trained are left to its end. Where one has other bits, `go_on` ends the run.

        Raises:
            Preempted: SIGTERM came.
        """
        self._recorded, self._began, self._moved = steps, began, lambda: moved
        self._wait(self._trained(self._early()))
        try:
            self.require()
        except Contradiction as failure:
            self._contradiction = failure
        if any(part not in self._done for _, part in self._early()):
            self._work = iter(())  # in vain

    def go_on(
        self,
        stopped: Callable[[], bool],
        moved: Callable[[], Sequence[str]],
        lent: _Lent = nullcontext,
    ) -> "Proof":
        """The run goes on after `early`.

        Raises:
            Contradiction: one has other bits than the run.
        """
        if self._contradiction:
            raise self._contradiction
        self._stopped, self._moved, self._lent = stopped, moved, lent
        return self

    def make(self, steps: int) -> dict[str, Any]:
        """Train all segments that are left of the run, which has made so many steps. Returns what its receipt states.

        Raises:
            Contradiction: one has other bits than the run.
            Preempted: SIGTERM came.
        """
        self._recorded, self._ended = steps, True
        self._wait(chain(self._work, self._trained(self._possible(steps))))
        self.require()
        self.close()
        checkpoint.drop(self._out / CHECKPOINTS, self._config.checkpoint.keep)
        (self._out / CONTRADICTION).unlink(missing_ok=True)
        if not self._done:
            return proved.none(f"no segment could be trained: {[*self._not_tried.values()][-1]}")
        if {choice.ranks for choice in self._done.values()} == {self._ranks}:
            is_fixed = self._config.parallel.reduce == "ddp"
            why = "on others no segment could be trained" if self._refused else "there is room for no other"
            self._not_tried[RANKS] = "parallel.reduce=ddp" if is_fixed else why
        return {
            "segments": [asdict(segment) | asdict(self._done[segment]) for segment in sorted(self._done, key=astuple)],
            "changed": [name for name in self._changed if name not in self._not_tried],
            "not_tried": self._not_tried,
            "varying": sorted(self._trainer.varying),
        }

    def require(self) -> None:
        """Refuse the run if a segment differs, and say why.

        Raises:
            Contradiction: it does.
        """
        if not (found := self.found):
            return
        segment, choice, rows, difference = found
        is_first = segment.first == self._segments[0].first
        changed = [row.name for row in rows if row.name not in self._not_tried]
        cause, means = cause_of(choice, self._own, rows, partial(self._differs, segment), is_first, self._moved)
        difference = replace(difference, tensor=self._tensor(found, cause))
        stated = {"difference": asdict(difference), "segment": asdict(segment), "trained": asdict(choice)}
        write_json(self._out / CONTRADICTION, stated | {"changed": changed, "cause": cause, "advice": means})
        raise Contradiction(
            f"{self._out / CONTRADICTION}: {difference}\n"
            f"The run contradicts itself, so it gets no receipt; its files are kept. {means}"
        )

    def _tensor(self, found: _Found, cause: str) -> str:
        """The first tensor that differs, where two ways to train the part show it: the run's own and the one that
        differs, or the run's own twice where any fresh process differs.

        Raises:
            Preempted: SIGTERM came.
        """
        segment, choice, rows, difference = found
        if difference.tensor or difference.phase not in (*tensor.KINDS, tensor.STATE):
            return difference.tensor
        if cause == FRESH and self.found and self.found is not found and self.found[3] == difference:
            return ""  # trained again it is always the same: what the run had is gone
        values = difference.step if difference.phase in tensor.KINDS else -1
        sides = []
        for way in (self._own, ()), ((self._own, ()) if cause == FRESH else (choice, rows)):
            self._differs(segment, *way, values)
            sides.append(tensor.digests(self._trainer.run, difference.phase, segment.stop))
        return tensor.first(difference.phase, *sides)

    def close(self) -> None:
        """End the process that trains segments, and remove what it has written."""
        self._trainer.close()

    def _possible(self, steps: int) -> list[tuple[int, Segment]]:
        """Those that the run has made and whose states there are; of one that has ended early, the end.

        Each has its number.
        """
        found = []
        for number, segment in enumerate(self._segments):
            most = segment.stop - segment.first
            if segment.stop > steps:  # what follows the last state before
                segment = Segment(max(step for step in self._kept() if step < steps), steps)
                most = max(most, self._config.checkpoint.every)
            if self._is_there(segment) and segment.stop - segment.first <= most:
                found.append((number, segment))
            else:
                self._not_tried[str(segment)] = "a state before or after it was not kept"
        return found

    def _kept(self) -> set[int]:
        """The numbers of steps after which the run's state is there, or is that of its beginning."""
        there = map(checkpoint.steps_of, checkpoint.found(self._out / CHECKPOINTS))
        return {self._segments[0].first, *there}

    def _is_there(self, segment: Segment) -> bool:
        """Whether the run has recorded all that the segment is compared with."""
        kept = self._kept()
        if segment.stop > self._recorded or segment.first not in kept:
            return False
        if self._config.trace.level != "off":
            return True
        return segment.stop in kept or str(segment.stop) in read_record(self._out, RUN).get("states", {})

    def _wait(self, work: Iterator[None]) -> None:
        began, said = time.monotonic(), ""
        with self._lent():
            for _ in work:
                if said != self._now and self._config.record.progress and time.monotonic() - began > SOON:
                    said = self._now
                    print(f"proof: {said}", file=sys.stderr, flush=True)
                if self._stopped():
                    raise Preempted(
                        "stopped by SIGTERM while the run proves itself; the same command goes on from there"
                    )
                time.sleep(PAUSE)

    def _trained(self, segments: Sequence[tuple[int, Segment]]) -> Iterator[None]:
        """Train segments, given their numbers, with less and less changed where one cannot be trained to its end.

        Each is waited for while the run goes on.
        """
        while self._attempts and not self.found:
            rows = self._attempts[0]
            try:
                for number, segment in segments:
                    while not self._ended and not self._is_there(segment):
                        yield
                    if segment not in self._done and not self.found and self._is_there(segment):
                        ways = choices(number, self._config, self._own) if rows else [self._own]
                        yield from self._tried(segment, ways, rows)
                return
            except (RunError, OSError) as failed:
                if any(f"[Errno {number}]" in str(failed) for number in FULL):  # no circumstance mends that
                    if self._ended:
                        raise
                    return  # at the end it is tried again
                self._failed = str(failed)
                self._attempts.pop(0)
                self.close()
                if self._attempts:
                    continue
                if not self._ended:  # at the end it is tried again, for then the run's memory is free
                    self._attempts = _attempts()
                    tried = f"{segment} on "
                    self._not_tried = {what: why for what, why in self._not_tried.items() if not what.startswith(tried)}
                    early = [part for each, part in self._early() if number < EARLY]
                    while not all(map(self._is_there, early)) and not self._ended:
                        yield
                    self.wants_room = bool(early) and not self._ended and anew.is_possible(self._project)
                    return
                if self._done and isinstance(failed, RunError) and not NO_ROOM.search(self._failed):  # another one was
                    self.found = segment, self._own, rows, again.failure(segment, str(failed))
                missed = [str(part) for _, part in segments if part not in self._done] if self._done else ["any part"]
                self._not_tried |= dict.fromkeys(missed, self._failed)

    def _tried(
        self, segment: Segment, choices: Sequence[Choice], rows: Sequence[setting.Row], values: int = -1
    ) -> Iterator[None]:
        """Train a segment in the first of these ways in which it comes to its end, and compare it.

        The tensors of the step `values` are kept.

        Raises:
            RunError: in none.
        """
        refused = ""
        for choice in choices:
            if self._hangs and choice != self._own:  # as where rank 0 alone evaluates: it would be waited for again
                continue
            if not self._trainer.is_started:
                yield from self._trainer.start(rows)
                self._not_tried |= self._trainer.not_tried
            began, self._now = time.monotonic(), f"{segment} on {choice}"
            patience = min(self._config.parallel.timeout_seconds, PATIENCE + int(began - self._began))
            ends = self._ended and segment.stop == self._recorded
            refused, difference = yield from self._trainer.compared(segment, choice, patience, ends, values)
            if not refused:
                self._done[segment] = choice
                self._changed = [ELSEWHERE, *(row.name for row in rows)]
                self._not_tried |= {row.name: self._failed for row in setting.ROWS if row not in rows}
                if difference:
                    self.found = segment, choice, rows, difference
                return
            self._not_tried[self._now] = refused
            self._refused = True
            self._hangs = self._hangs or time.monotonic() - began >= patience
        raise RunError(refused)

    def _differs(self, segment: Segment, choice: Choice, rows: Sequence[setting.Row], values: int = -1) -> bool:
        """Whether a segment differs that is trained in this way; not where it cannot be trained so.

        The tensors of the step `values` are kept.

        Raises:
            Preempted: SIGTERM came.
        """
        self.close()
        self.found = None
        try:
            self._wait(self._tried(segment, [choice], rows, values))
        except Preempted:
            raise
        except (RunError, OSError):
            pass
        return self.found is not None
