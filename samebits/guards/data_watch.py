"""Refusal of a loop that changes what samples are made from: the dataset, its `collate` function or its order.

A loader worker has a copy of these from before the first step. A loop that sets `train_set.strength = 0.3` changes the
samples without loader workers, and changes none with them: a neutral key would decide the weights.

What changes while a sample is made, such as a cache, is the dataset's own doing: `making` marks these moments. The
search is bounded. The proof of a run trains parts of it with loader workers, and finds what the search does not reach.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from ..base.shape import shown
from ..core.errors import UserError
from ..core.observer import Ballot, Observer, View
from .carried import owners_frames
from .probes import NOTHING, Content, Entries, walk


class DataWatch(Observer):
    """Compares what samples are made from before and after the lines of the loop."""

    name = "data watch"

    def __init__(self, roots: Mapping[str, object], unsaved: Collection[str]) -> None:
        """Look at `roots`, by the owner's names for them.

        No sample depends on attributes whose names, in full or by the last word, are in `unsaved`.
        """
        self._roots, self._unsaved = roots, unsaved
        self._has_made = False
        self._begin()

    def _begin(self) -> None:
        self._probes = walk(self._roots)[1]
        self._look()

    def _look(self) -> None:
        self._entries = [probe.read() for probe in self._probes]

    @contextmanager
    def making(self) -> Iterator[None]:
        """Let the dataset change itself while samples are made in this process.

        Raises:
            UserError: the loop changed something before.
        """
        self.require()
        try:
            yield
        finally:
            if self._has_made:
                self._look()
            else:  # some datasets open their files with the first sample
                self._has_made = True
                self._begin()

    def ballot(self, view: View) -> Ballot:
        """Look at the end of each step, so that the run also stops where loader workers make the samples."""
        self.require()
        return Ballot()

    def require(self) -> None:
        """Refuse a change since the last look.

        Raises:
            UserError: the loop changed a value, which the message names.
        """
        for probe, before in zip(self._probes, self._entries, strict=True):
            now = probe.read()
            if _are_equal(before, now):
                continue
            old, new = dict(before), dict(now)
            for key in old if probe.is_installed else old | new:
                self._require_equal(probe.path_of(key), old.get(key, NOTHING), new.get(key, NOTHING))

    def _require_equal(self, path: str, old: object, new: object) -> None:
        if old is new or self._is_unsaved(path):
            return
        before, now = (walk({path: value})[0] for value in (old, new))
        for inner_path in before | now:
            values = before.get(inner_path, NOTHING), now.get(inner_path, NOTHING)
            if values[0] != values[1] and not self._is_unsaved(inner_path):
                raise UserError(_message(inner_path, *values))

    def _is_unsaved(self, path: str) -> bool:
        return any(re.search(rf"(^|\.){re.escape(name)}($|[.\[])", path) for name in self._unsaved)


def names_of(objects: Mapping[str, object]) -> dict[str, object]:
    """Return objects by the name of a variable of the loop's function that holds each, or else by the name given."""
    variables = {id(value): name for frame in owners_frames() for name, value in frame.f_locals.items()}
    return {variables.get(id(value), name): value for name, value in objects.items() if value is not None}


def _are_equal(before: Entries, now: Entries) -> bool:
    try:
        return before == now  # identical values are not compared, so this mostly calls no code of theirs
    except Exception:  # two arrays, or what else cannot be compared
        return False


def _message(path: str, before: object, now: object) -> str:
    expected, actual, name = _worded(before), _worded(now), path.rpartition(".")[2].partition("[")[0]
    return (
        f"{path}: expected {expected} in all steps, got {'other numbers' if actual == expected else actual}. The loop "
        f"changed it, and loader workers have copies that stay as they were. Compute it where samples are made, such "
        f"as from samebits.item_epoch(). If no sample depends on it: run.steps(..., unsaved=({name!r},))"
    )


def _worded(value: object) -> str:
    return value.words if isinstance(value, Content) else shown(value)
