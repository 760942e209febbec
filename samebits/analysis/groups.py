"""The groups of runs that `samebits compare` is given: their records, their metrics, and what to know of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base.shape import plain, shown
from ..base.text import short, some
from ..core.errors import RunError, UserError
from ..record.names import METRICS, RECEIPT
from ..record.view import RunView, is_stated
from .results import STEPS
from .sources import listed, located
from .statistics import Numbers

USAGE = "samebits compare A... -- B..."
LARGEST = 1e300  # a sum of many such numbers is still finite
LONGEST = 60  # characters of a name that somebody else chose


def divided(words: Sequence[str], divider: str) -> tuple[list[str], list[str]]:
    """The words before the one divider, and those after it.

    Raises:
        UserError: there is not one, or no word on one of its sides.
    """
    if (count := words.count(divider)) != 1:
        raise UserError(f"{count or 'no'} -- seen, one between the groups wanted: {USAGE}")
    place = words.index(divider)
    groups = list(words[:place]), list(words[place + 1 :])
    for name, group, side in zip("AB", groups, ("before", "after"), strict=True):
        if not group:
            raise UserError(f"group {name}: no run {side} the --, one or more wanted: {USAGE}")
    return groups


def read_group(words: Sequence[str], uri: Callable[[], str]) -> list[RunView]:
    """The runs that a group names: directories, receipts, ids of runs or names of experiments in the MLflow at `uri`.

    Raises:
        UserError: one is not to be found, is not finished, or was altered.
    """
    found = []
    for name in [name for word in words for name in listed(word, uri)]:
        with located(name, uri, {METRICS, RECEIPT}) as path:
            found.append(_read(path, name))
    return found


def _read(path: Path, name: str) -> RunView:
    run = RunView(path, name)
    try:
        held = run.required
        if path.is_dir() and (path / METRICS).exists() and not is_stated(held, METRICS):
            raise UserError(
                f"{path / METRICS}: other metrics than {RECEIPT} beside it states: altered, or brought back by DVC or "
                f"git from another run. Train again, or name the receipt"
            )
        _ = run.metrics, run.addressed, run.numeric  # all that is asked of it later: its files may be gone then
    except RunError as failure:  # also where it is altered: 1 is no exit code of a comparison
        said = str(failure)
        raise UserError(name + said.removeprefix(str(path)) if said.startswith(str(path)) else said) from None
    return run


def require_different(runs: Sequence[RunView]) -> None:
    """Refuse a run that is given twice, under one name or two."""
    seen: dict[str, RunView] = {}
    for run in runs:
        first = seen.setdefault(run.required.name, run)
        if first is not run:
            both = plain(first.name if first.name == run.name else f"{first.name} and {run.name}")
            raise UserError(f"{both}: the same run given twice (receipt {run.required.name[:16]}); give each run once")


def chosen(a: Sequence[RunView], b: Sequence[RunView], requested: Sequence[str]) -> tuple[list[str], list[str]]:
    """The metrics to compare, and those that only one group has."""
    of_a, of_b = ({name for run in group for name in run.metrics} for group in (a, b))
    both = sorted((of_a & of_b) - {STEPS})
    if not (requested or both):
        have = " | ".join(some([*map(named, sorted(names - {STEPS}))]) or "none" for names in (of_a, of_b))
        raise UserError(f"no metric that both groups have: {have} seen (A | B). Compare runs of one task")
    return list(dict.fromkeys(requested)) or both, [] if requested else sorted((of_a ^ of_b) - {STEPS})


def values(runs: Sequence[RunView], metric: str) -> Numbers:
    """The metric of each run.

    Raises:
        UserError: a run does not have it, or it is no number to reckon with.
    """
    for run in runs:
        if metric not in run.metrics:
            have = some([*map(named, sorted(run.metrics))], 9)
            raise UserError(
                f"{plain(run.name)}: no metric {named(metric)}, it has {have or 'none'}; choose with --metric NAME"
            )
        value = run.metrics[metric]
        if not abs(value) <= LARGEST:
            raise UserError(
                f"{plain(run.name)}: {named(metric)} is {value:g}, a finite number up to {LARGEST:g} wanted; "
                f"find out why, or choose another metric with --metric NAME"
            )
    return np.array([run.metrics[metric] for run in runs])


def notes(a: Sequence[RunView], b: Sequence[RunView]) -> list[str]:
    """What a reader has to know of the groups before the verdict, a line of each."""
    within = [_varied(group, lambda run: run.addressed) for group in (a, b)]
    between = [key for key in _varied([*a, *b], lambda run: run.addressed) if key not in {*within[0], *within[1]}]
    found = []
    if between:
        pairs = [
            f"{key}: {short(a[0].addressed.get(key), 24)} | {short(b[0].addressed.get(key), 24)}" for key in between
        ]
        found.append(f"A and B differ in what was asked for: {some(pairs)}")
    for name, keys in zip("AB", within, strict=True):
        if others := [key for key in keys if key != "seed"]:
            found.append(f"{name}: its runs differ in more than the seed: {some(others)}")
    if keys := _varied([*a, *b], lambda run: run.numeric):
        found.append(f"the runs differ in numeric environment: {some(keys)}")
    counts = [(len(group), len({run.address["address"] for run in group})) for group in (a, b)]
    if any(runs > addresses for runs, addresses in counts) and any(addresses > 1 for _, addresses in counts):
        said = ", ".join(f"{runs} runs of {of} in {name}" for name, (runs, of) in zip("AB", counts, strict=True))
        found.append(
            f"content addresses have several runs each ({said}): a repeat is no new draw, so p may be too small; give "
            f"one run of each"
        )
    return found


def _varied(runs: Sequence[RunView], of: Callable[[RunView], Mapping[str, Any]]) -> list[str]:
    """The fields in which runs differ."""
    held = [of(run) for run in runs]
    return sorted(key for key in set().union(*held) if any(each.get(key) != held[0].get(key) for each in held))


def named(text: str) -> str:
    """A name that somebody else chose: as it is where it is plainly one, else quoted, escaped and cut."""
    return text if re.fullmatch(rf"[\w.@%/-]{{1,{LONGEST}}}", text) else shown(text, LONGEST)
