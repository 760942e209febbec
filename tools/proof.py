"""Let runs prove themselves: how often a right one is refused, and what a proof takes: the tables of docs/proof.md.

    python tools/proof.py [--runs N] [--rounds N] [--only SUBJECT]

Runs of the starters and of networks of other people, each with a seed of its own, shortened as `verify.shorten` in
their params.yaml says. None of them depends on anything that must not matter, so each proof that is not EQUAL is a
false alarm. Then the released run of a starter is trained with its proof and without, by turns, and so are a long run
and a large model, once. With --only the rows of these subjects are printed, and no document is written.
"""

import math
import re
import shutil
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import networks
from bake import ROOT, venv_of
from harness import about, arguments, in_turn, prepared, printed, spread, table, write

RESULT = ROOT / "docs" / "proof.md"
STARTERS = "digits", "finetuning", "images", "language", "series", "tabular", "blank"
STRANGERS = "networks of other people"
SUBJECTS = *STARTERS, STRANGERS
LINE = re.compile(r"(?m)^proof +(EQUAL|none)")
NO_RECEIPT = "DIFFERS"
HEAD = "subject | runs | EQUAL | without a proof | refused"
COST = "run | seconds without a proof | with it | more"
LARGE = "model.width=768", "model.layers=13", "model.heads=12", "parallel.global_batch=8", "train.steps=8"
# A run -> its starter, its settings, when it proves itself, the most rounds.
RUNS: dict[str, tuple[str, Sequence[str], str, int]] = {
    "digits": ("digits", (), "end", 99),
    "tabular": ("tabular", (), "end", 99),
    "digits, 40,500 steps": ("digits", ("train.epochs=1800",), "end", 1),
    "language, 100 million parameters, 8 steps": ("language", LARGE, "early", 1),
}


def short(project: Path) -> list[str]:
    """The overrides that make a training of a project short."""
    text = (project / "params.yaml").read_text()
    found = re.search(r"(?m)^  shorten: \[(.*)\]", text)
    return [word.strip().strip("\"'") for word in found[1].split(",")] if found and found[1] else []


def verdict(said: str) -> str:
    """What the proof of a training came to, of which this was printed."""
    found = LINE.search(said)
    return found[1] if found else NO_RECEIPT


def train(project: Path, starter: str, *settings: str) -> str:
    """Train; return the verdict of its proof."""
    shutil.rmtree(project / "runs", ignore_errors=True)
    given = [word for text in ("tracking.enabled=false", *settings) for word in ("--set", text)]
    words = "-m", "samebits", "train", "--quiet", "--out", "runs/one", *given
    return verdict(printed(project, *words, ends=(0, 1), venv=venv_of(starter)))


def keys(subject: str, seed: int) -> list[str]:
    """The overrides of one run: a seed, and of the networks one after another."""
    return [f"seed={seed}", *[f"model.name={networks.NAMES[seed % len(networks.NAMES)]}"] * (subject == STRANGERS)]


def alarms(requested: Namespace) -> Iterator[list[object]]:
    """A row for each subject, and one for all."""
    total = Counter[str]()
    each = math.ceil(requested.runs / len(SUBJECTS))
    for subject in requested.only:
        starter, change = (networks.STARTER, networks.lay) if subject == STRANGERS else (subject, None)
        with prepared(starter, change) as project:
            seen = Counter(train(project, starter, *keys(subject, seed), *short(project)) for seed in range(each))
        total += seen
        yield [subject, each, seen["EQUAL"], seen["none"], seen[NO_RECEIPT]]
    yield ["all", total.total(), total["EQUAL"], total["none"], total[NO_RECEIPT]]


def costs(requested: Namespace) -> Iterator[list[object]]:
    """A row for each of `RUNS`: seconds from the start of the command to its end."""

    def seconds(project: Path, starter: str, settings: Sequence[str], when: str) -> float:
        began = time.perf_counter()
        found = train(project, starter, *settings, f"prove.when={when}")
        taken = time.perf_counter() - began
        if found != ("none" if when == "never" else "EQUAL"):
            sys.exit(f"{starter}, prove.when={when}: the proof says {found}, so its time means nothing")
        return taken

    for name, (starter, settings, when, most) in RUNS.items():
        with prepared(starter) as project:
            train_timed = partial(seconds, project, starter, settings)
            found = in_turn(("never", when), train_timed, range(min(most, requested.rounds)))
        more = sorted(one - other for one, other in zip(found[when], found["never"], strict=True))
        shown = [spread(min(taken), sorted(taken)[len(taken) // 2], max(taken), ".1f") for taken in found.values()]
        yield [name, *shown, spread(more[0], more[len(more) // 2], more[-1], ".1f")]


def main() -> None:
    """Measure, and write the tables into the document."""
    requested = arguments(__doc__, RESULT, SUBJECTS, rounds=5, runs=200)
    if len(requested.only) < len(SUBJECTS):
        table(HEAD, alarms(requested))
        return
    place = f"{about()} {requested.rounds} rounds."
    found = table(HEAD, alarms(requested))
    write(requested.out, place, found)  # an interrupted measurement leaves what it has
    write(requested.out, place, found, table(COST, costs(requested)))


if __name__ == "__main__":
    main()
