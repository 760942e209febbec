"""One HTML page on runs: what was asked, on what, what happened, whether the bits are equal."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup, escape

from ...base.project import LIBRARY
from ...base.shape import plain
from ...base.text import differences, flatten
from ...record import proved
from ...record.names import CONTRADICTION
from ...record.view import RunView
from ..rendering import render
from . import bits, drawn, measured, plots, public

TEMPLATE = LIBRARY / "analysis" / "report" / "report.html.j2"
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?( [%\wµ]{1,3})?$|unknown$|not finite$")
JOINT = re.compile(r"(?<!\d)[._/](?=\w)")
DIGEST = re.compile("[0-9a-f]{32,}")
Fact = tuple[str, Callable[[RunView], str]]  # its name, and what it is of a run
Table = tuple[str, list[str], list[list[str]]]  # caption, head, rows
# Of the content address.
PARTS = {"code": "code", "core": "core", "lock": "lock", "data manifest": "data", "config": "config"}


@dataclass(frozen=True)
class Extras:
    """What other verbs measured, where it was given."""

    noise: Mapping[str, Any] | None = None
    cost: Mapping[str, Any] | None = None
    doctor: list[Mapping[str, str]] | None = None


def report(runs: Sequence[RunView], extras: Extras = Extras(), links: Mapping[str, str] = {}) -> str:
    """The page. It needs no other file, asks no network and runs no script. `links` are URLs by names of runs."""
    word, good, sentences = bits.judge(runs)
    doubts = [f"{run.name}: {public.words(doubt)}." for run in runs for doubt in run.doubts]
    pens, names = [plots.pen(number) for number in range(len(runs))], [run.name for run in runs]
    metrics = drawn.metrics_in_order(runs)
    differing, config = _config(runs)
    return render(
        TEMPLATE,
        soft=_soft,
        column=partial(_column, links),
        kind=_kind,
        columns=_columns,
        names=names,
        count=f"{len(runs)} run{'s' * (len(runs) > 1)}",
        word=word,
        good=good,
        sentences=[*doubts, *sentences],
        differing=differing,
        config=config,
        machine=_compared("Code, data and machine", runs, _machine()),
        outcome=_compared("Outcome", runs, _outcome(runs)),
        lines=[*zip(names, pens, strict=True)],
        curves=drawn.curves(runs, pens, metrics, extras.noise),
        undrawn=metrics[drawn.MOST :],
        times=drawn.times(runs),
        fold=drawn.FOLDED,
        memory=drawn.memory(runs),
        parting=drawn.parting(runs, pens),
        noise=measured.noise_floor(extras.noise, metrics),
        cost=measured.costs(extras.cost),
        environments=_environments(runs),
        checklist=measured.checklist(extras.doctor),
        faults=sum(row["state"] == "FAULT" for row in extras.doctor or ()),
        stretches=plots.STRETCHES,
    )


def _soft(cell: str) -> Markup:
    """A cell that may be broken between the parts of a name."""
    return Markup(JOINT.sub("\\g<0><wbr>", str(escape(plain(cell)))))


def _column(links: Mapping[str, str], cell: str) -> Markup:
    """The head of a column; the name of a run leads to its files."""
    return Markup('<a href="{}">{}</a>').format(links[cell], _soft(cell)) if cell in links else _soft(cell)


def _kind(cell: str, numeric: bool) -> Markup:
    kind = "number" if numeric else "digest" if DIGEST.search(cell) else "short" if len(cell) <= 12 else ""
    return Markup(f' class="{kind}"' if kind else "")


def _columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns hold numbers alone."""
    return [all(NUMBER.match(cell) for cell in column) for column in zip(*rows, strict=True)]


def _compared(caption: str, runs: Sequence[RunView], facts: Iterable[Fact]) -> list[Table]:
    """Tables with a row for each fact: one with a column for each run, where they differ, and one of all alike.

    Facts that no run has are left out.
    """
    cells = [[name, *(of(run) for run in runs)] for name, of in facts]
    known = [row for row in cells if any(row[1:])]
    names = [run.name for run in runs]
    if len(runs) == 1:
        return [(caption, ["fact", *names], known)]
    different = [row for row in known if len({*row[1:]}) > 1]
    return [
        (f"{caption}: where the runs differ", ["fact", *names], different),
        (f"{caption}: the same for all", ["fact", "all runs"], [row[:2] for row in known if row not in different]),
    ]


def _config(runs: Sequence[RunView]) -> tuple[list[list[str]], list[list[str]]]:
    """A row for each key in which runs differ, with whether it enters the address; and one for each key."""
    keys = sorted({key for run in runs for key in run.config})
    addressed = {name for run in runs for name in run.addressed}
    rows = {key: [key, *(public.value(key, run.config.get(key)) for run in runs)] for key in keys}
    differing = [
        [*row, "yes" if {key, f"config.{key}"} & addressed else "no"]
        for key, row in rows.items()
        if any(run.config.get(key) != runs[0].config.get(key) for run in runs)
    ]
    return differing, [*rows.values()]


def _machine() -> list[Fact]:
    def within(of: str, *path: str) -> Callable[[RunView], str]:
        def held(run: RunView) -> str:
            value: Any = getattr(run, of)
            for name in path:
                value = value.get(name) if isinstance(value, Mapping) else None
            return "" if value is None else public.words(str(value))

        return held

    def patch(run: RunView) -> str:
        return (run.code.get("patch") or "none") if run.code else ""

    INFORMATIONAL = "informational"
    return [
        ("content address", within("address", "address")),
        ("commit", lambda run: (run.code.get("commit") or "none") if run.code else ""),
        ("patch of uncommitted code", patch),
        *((part, within("address", "parts", name)) for part, name in PARTS.items()),
        ("numeric environment", within("environment", "environment")),
        ("its class", within("environment", "class")),
        ("CPU", within("environment", INFORMATIONAL, "cpu")),
        ("cores", within("environment", INFORMATIONAL, "cores")),
        ("GPU", within("environment", "preimage", "cuda", "gpu")),
        ("GPU driver", within("environment", "preimage", "cuda", "driver")),
        ("torch", within("environment", "preimage", "torch", "version")),
        ("python", within("environment", "preimage", "python")),
        ("image", within("environment", "preimage", "image")),
        ("system", within("environment", INFORMATIONAL, "system")),
        ("host", within("environment", INFORMATIONAL, "host")),
        ("world size", within("environment", INFORMATIONAL, "world_size")),
    ]


def _outcome(runs: Sequence[RunView]) -> list[Fact]:
    def status(run: RunView) -> str:
        return run.status if run.status == "FINISHED" else f"{run.status}: {run.done} steps so far"

    def checked(run: RunView) -> str:
        return "; ".join(map(public.words, run.doubts)) or ("as it states" if run.receipt else "")

    def proof(run: RunView) -> str:
        if run.holds(CONTRADICTION):
            return "DIFFERS: the run contradicts itself"
        stated = run.receipt.stated.get("proof") if run.receipt else None
        return public.words(proved.words(stated)) if stated else ""

    def metric(name: str) -> Callable[[RunView], str]:
        return lambda run: repr(run.metrics[name]).removesuffix(".0") if name in run.metrics else ""

    names = sorted({name for run in runs for name in run.metrics} - {"steps"})
    return [
        ("status", status),
        ("steps", lambda run: str(run.done)),
        ("started from", lambda run: public.words(run.started_from)),
        ("ended early", lambda run: public.words(run.ends.get("stopped", ""))),
        ("best weights", lambda run: run.ends.get("best", "")),
        ("resumed after steps", lambda run: ", ".join(map(str, run.resumed))),
        ("weights", lambda run: run.weights or ""),
        ("trace root", lambda run: run.root or ""),
        ("receipt", lambda run: run.receipt.name if run.receipt else "none"),
        ("files beside the receipt", checked),
        ("proof", proof),
        *((f"metric {name}", metric(name)) for name in names),
        ("seconds", lambda run: f"{run.seconds:.1f}" if run.seconds is not None else ""),
        ("peak memory", lambda run: measured.size(run.memory) if run.memory else ""),
    ]


def _environments(runs: Sequence[RunView]) -> list[list[str]]:
    """A row for each field in which the numeric environments differ."""
    preimages = [run.environment.get("preimage", {}) for run in runs]
    fields = sorted({each.field for other in preimages[1:] for each in differences(preimages[0], other)})
    flat = [flatten(preimage) for preimage in preimages]
    return [[field, *(public.value(field, each.get(field)) for each in flat)] for field in fields]
