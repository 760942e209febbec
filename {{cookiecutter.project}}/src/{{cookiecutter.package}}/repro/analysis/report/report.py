"""One HTML page on runs: what was asked, on what, what happened, whether the bits are equal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.shape import plain
from ...base.text import differences, flatten
from .. import diff
from . import bits, drawn, measured, page, plots, public
from .seen import Seen

PARTS = {"code": "code", "lock": "lock", "data manifest": "data", "config": "config"}  # of the content address


@dataclass(frozen=True)
class Extras:
    """What other verbs measured, where it was given."""

    noise: Mapping[str, Any] | None = None
    cost: Mapping[str, Any] | None = None
    doctor: list[Mapping[str, str]] | None = None


def report(runs: Sequence[Seen], extras: Extras = Extras()) -> str:
    """The page."""
    word, sentences = bits.judge(runs)
    pens = [plots.pen(number) for number in range(len(runs))]
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    metrics = drawn.metrics_in_order(runs)
    parts = [
        _title(count, word, sentences, runs),
        _asked(runs),
        _on_what(runs),
        _happened(runs),
        drawn.curves(runs, pens, metrics, extras.noise),
        drawn.times(runs),
        drawn.memory(runs),
        drawn.divergence(runs, pens),
        measured.noise_section(extras.noise, metrics),
        measured.cost_section(extras.cost),
        _environments(runs),
        measured.doctor_section(extras.doctor),
        "<footer>"
        + page.paragraph(
            f"A line of more than {plots.STRETCHES} points shows the means of {plots.STRETCHES} stretches, and a shade",
            "from the smallest to the largest value of each. This page loads nothing and runs no script.",
            kind="note",
        )
        + "</footer>",
    ]
    return page.document(f"{count}: {word}" if word else count, "\n".join(part for part in parts if part))


def _title(count: str, word: str, sentences: Sequence[str], runs: Sequence[Seen]) -> str:
    good = " good" if word in (diff.EQUAL, diff.SO_FAR) else ""
    said = f'{count}: <span class="word{good}">{word}</span>' if word else count
    doubts = [f"{run.name}: {public.words(doubt)}." for run in runs for doubt in run.doubts]
    items = "\n".join(f"<li>{page.text(sentence)}</li>" for sentence in [*doubts, *sentences])
    return f'<header>\n<h1>{said}</h1>\n<ul class="verdict">\n{items}\n</ul>\n</header>'


def _names(runs: Sequence[Seen]) -> list[str]:
    return [run.name for run in runs]


def _compared(caption: str, head: str, runs: Sequence[Seen], rows: Sequence[tuple[str, Callable[[Seen], str]]]) -> str:
    """Tables with a row for each fact: one with a column for each run, where they differ, and one of all alike.

    Facts that no run has are left out.
    """
    cells = [[name, *(of(run) for run in runs)] for name, of in rows]
    known = [row for row in cells if any(row[1:])]
    if len(runs) == 1:
        return page.table(caption, [head, *_names(runs)], known)
    different = [row for row in known if len({*row[1:]}) > 1]
    alike = [row[:2] for row in known if row not in different]
    return "\n".join(
        [
            page.table(f"{caption}: where the runs differ", [head, *_names(runs)], different),
            page.table(f"{caption}: the same for all", [head, "all runs"], alike),
        ]
    )


def _asked(runs: Sequence[Seen]) -> str:
    keys = sorted({key for run in runs for key in run.config})
    if not keys:
        return page.section("What was asked", page.paragraph("No config is recorded."))
    different = [key for key in keys if any(run.config.get(key) != runs[0].config.get(key) for run in runs)]
    addressed = {name for run in runs for name in run.addressed}

    def row(key: str) -> list[str]:
        return [key, *(public.value(key, run.config.get(key)) for run in runs)]

    def enters(key: str) -> str:
        return "yes" if key in addressed or f"config.{key}" in addressed else "no"

    head = ["key", *_names(runs)]
    equal = "All keys have the same values." if len(runs) > 1 and not different else ""
    rows = [[*row(key), enters(key)] for key in different]
    return page.section(
        "What was asked",
        page.paragraph(equal),
        page.table("Keys in which the runs differ", [*head, "in the content address"], rows),
        page.folded(f"All {len(keys)} keys", page.table("The whole config", head, map(row, keys))),
    )


def _on_what(runs: Sequence[Seen]) -> str:
    def within(of: str, *path: str) -> Callable[[Seen], str]:
        def held(run: Seen) -> str:
            value: Any = getattr(run, of)
            for name in path:
                value = value.get(name) if isinstance(value, Mapping) else None
            return "" if value is None else public.words(str(value))

        return held

    def patch(run: Seen) -> str:
        return (run.code.get("patch") or "none") if run.code else ""

    told = "informational"
    rows = [
        ("content address", within("address", "address")),
        ("commit", lambda run: (run.code.get("commit") or "none") if run.code else ""),
        ("patch of uncommitted code", patch),
        *((part, within("address", "parts", name)) for part, name in PARTS.items()),
        ("numeric environment", within("environment", "environment")),
        ("its class", within("environment", "class")),
        ("CPU", within("environment", told, "cpu")),
        ("cores", within("environment", told, "cores")),
        ("GPU", within("environment", "preimage", "cuda", "gpu")),
        ("GPU driver", within("environment", "preimage", "cuda", "driver")),
        ("torch", within("environment", "preimage", "torch", "version")),
        ("python", within("environment", "preimage", "python")),
        ("image", within("environment", "preimage", "image")),
        ("system", within("environment", told, "system")),
        ("host", within("environment", told, "host")),
        ("world size", within("environment", told, "world_size")),
    ]
    return page.section("On what", _compared("Code, data and machine", "fact", runs, rows))


def _happened(runs: Sequence[Seen]) -> str:
    def status(run: Seen) -> str:
        return run.status if run.status == "FINISHED" else f"{run.status}: {run.done} steps so far"

    def checked(run: Seen) -> str:
        return "; ".join(map(public.words, run.doubts)) or ("as it states" if run.receipt else "")

    def metric(name: str) -> Callable[[Seen], str]:
        return lambda run: repr(run.metrics[name]).removesuffix(".0") if name in run.metrics else ""

    names = sorted({name for run in runs for name in run.metrics} - {"steps"})
    rows = [
        ("status", status),
        ("steps", lambda run: str(run.done)),
        ("resumed after steps", lambda run: ", ".join(map(str, run.side.resumed)) if run.side else ""),
        ("weights", lambda run: run.weights or ""),
        ("trace root", lambda run: run.root or ""),
        ("receipt", lambda run: run.receipt.name if run.receipt else "none"),
        ("files beside the receipt", checked),
        *((f"metric {plain(name)}", metric(name)) for name in names),
        ("seconds", lambda run: f"{run.seconds:.1f}" if run.seconds is not None else ""),
        ("peak memory", lambda run: measured.size(run.memory) if run.memory else ""),
    ]
    return page.section("What happened", _compared("Outcome", "fact", runs, rows))


def _environments(runs: Sequence[Seen]) -> str:
    """The fields in which the numeric environments differ."""
    if len(runs) < 2:
        return ""
    preimages = [run.environment.get("preimage", {}) for run in runs]
    fields = sorted({each.field for other in preimages[1:] for each in differences(preimages[0], other)})
    flat = [flatten(preimage) for preimage in preimages]
    rows = [[field, *(public.value(field, each.get(field)) for each in flat)] for field in fields]
    return page.section(
        "Differences of the numeric environments",
        page.table("Fields in which the runs differ", ["field", *_names(runs)], rows),
        "" if rows else page.paragraph("None: the runs have one numeric environment."),
    )
