"""Kill a training again and again, at random instants and at each system call, and compare it with one left alone.

    python tools/chaos.py [--kills 100] [--seed 0]

The random kills meet changing world sizes. Their instants are drawn beforehand by `plan`; the phase in the table is
what the run directory showed after each kill. Compared are the weights, the optimizer's state, the logged numbers, the
proof and MLflow's table.
"""

import hashlib
import json
import os
import random
import shutil
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bake import NAME, ROOT, bake, make_venv
from chaos_calls import MISSED, section
from harness import about, arguments, printed, table, within, write

PROJECT = ROOT / "build" / "chaos" / NAME  # which stays, so that what differs can be looked at
RESULT = ROOT / "docs" / "chaos.md"
SIZES = (1, 2, 3, 4)
DRAWN = (1, 1, 1, 2, 2, 3, 4)  # the small ones more often: they start faster
PHASES = ("before the first checkpoint", "while resuming", "between two checkpoints", "while writing one")
EVERY = 2  # steps between checkpoints
FIRST = 6  # kills that come so early that few find a checkpoint
STEPS_PER_KILL = 10  # on average, with margin: so long is the run made
STEPS_PER_EPOCH = 1438 / 64


@dataclass(frozen=True)
class Blow:
    """One kill as drawn: on how many ranks, and when."""

    ranks: int
    rows: int  # wait for so many newly logged steps
    writing: bool  # then for a checkpoint being written, a second at most
    delay: float  # then so many seconds
    follower: bool  # whether the uploading process is killed too


def plan(kills: int, seed: int) -> list[Blow]:
    """The kills of one chaos, from its seed."""
    dice = random.Random(seed)
    blows = []
    for number in range(kills):
        early = number < FIRST or dice.random() < 0.15
        writing = not early and dice.random() < 0.6
        delay = dice.uniform(0, 1.5 if early else 0.01 if writing else 0.1)
        rows = 0 if early else dice.randint(1, 5)
        blows.append(Blow(dice.choice(DRAWN), rows, writing, delay, dice.random() < 0.5))
    return blows


def strike(blow: Blow, victim: Any) -> str | None:
    """Kill as drawn; return the phase met, or None if the run ended before."""
    met = not blow.rows or victim.until(lambda: victim.news() >= blow.rows)
    if not met:
        return None
    end = time.monotonic() + blow.writing  # a second: a checkpoint is written in milliseconds
    while time.monotonic() < end and not victim.writing():
        pass
    time.sleep(blow.delay)
    if victim.process.poll() is not None:
        return None
    victim.kill(blow.follower)
    if victim.writing():
        return PHASES[3]
    if not victim.checkpoints():
        return PHASES[0]
    return PHASES[2] if victim.news() > 0 else PHASES[1]


def content(out: Path) -> dict[str, str]:
    """Digests of all that must be equal."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = json.dumps([[row["step"], row["metrics"]] for row in rows])
    last = sorted((out / "checkpoints").glob("0*"))[-1]
    proof = json.loads((out / "receipt.json").read_bytes())["predicate"]["proof"]
    return {
        "weights": sha256((out / "model.safetensors").read_bytes()),
        "optimizer state": sha256((last / "optimizer.safetensors").read_bytes()),
        "last checkpoint": sha256((last / "manifest.json").read_bytes()),
        "logged numbers": sha256(logged.encode()),
        "steps that the proof trained again": sha256(json.dumps(proof["segments"]).encode()),
    }


def sha256(content: bytes) -> str:
    """In hex."""
    return hashlib.sha256(content).hexdigest()


def tracked(out: Path) -> str:
    """A digest of what MLflow holds of a run, or what is wrong with it."""
    identity = json.loads((out / "run.json").read_text())["id"]
    with closing(sqlite3.connect(PROJECT / "chaos.db")) as store:
        query = "SELECT run_uuid, status FROM runs JOIN tags USING (run_uuid) WHERE value = ?"
        runs = store.execute(query, [identity]).fetchall()
        if [status for _, status in runs] != ["FINISHED"]:
            return f"runs: {[status for _, status in runs]}"
        query = "SELECT key, step, value FROM metrics WHERE run_uuid = ?"
        rows = store.execute(query, [runs[0][0]]).fetchall()
    twice = [place for place, count in Counter(row[:2] for row in rows).items() if count > 1]
    return f"{len(twice)} steps more than once" if twice else sha256(json.dumps(sorted(rows)).encode())


def chaos(kills: int, seed: int) -> str:
    """Kill at random; the Markdown."""
    from victim import Victim  # of the library's tests

    epochs = max(1, round(kills * STEPS_PER_KILL / STEPS_PER_EPOCH))
    settings = f"train.epochs={epochs}", f"checkpoint.every={EVERY}", "tracking.wait_seconds=300"
    words = [text for setting in settings for text in ("--set", setting)]
    reference = Victim(PROJECT / "alone", *words)
    if reference.end(3600) != 0:
        sys.exit(reference.log.read_text())
    print(f"{reference.rows()} rows by the run left alone", flush=True)
    struck: Counter[tuple[str, int]] = Counter()
    for number, blow in enumerate(plan(kills, seed), start=1):
        victim = Victim(PROJECT / "killed", *words, ranks=blow.ranks if blow.ranks > 1 else None)
        phase = strike(blow, victim)
        if phase is None:
            break
        struck[phase, blow.ranks] += 1
        print(f"kill {number}: {phase}, {blow.ranks} ranks, {victim.rows()} rows", flush=True)
    else:
        victim = Victim(PROJECT / "killed", *words, ranks=3)
    if victim.end(3600) != 0:
        sys.exit(victim.log.read_text()[-3000:])
    resumed = victim.log.read_text().count("resumed ")
    contents = [content(out) | {"numbers in MLflow": tracked(out)} for out in (PROJECT / "alone", PROJECT / "killed")]
    return markdown(struck, resumed, victim.rows(), *contents)


def markdown(
    struck: Counter[tuple[str, int]], resumed: int, rows: int, alone: dict[str, str], killed: dict[str, str]
) -> str:
    """The result as tables."""
    verdict = {True: "EQUAL", False: "DIFFERENT"}
    counts = {phase: [struck[phase, size] for size in SIZES] for phase in PHASES}
    compared = [(what, alone[what], killed[what]) for what in alone]
    return "\n\n".join(
        [
            "## At random",
            f"Killed {struck.total()} times: **{verdict[alone == killed]}**. {resumed} of the starts came so far as to "
            f"resume it; {rows} logged rows, a checkpoint every {EVERY} steps.",
            table(
                " | ".join(["killed", *(f"{size} rank{'s' * (size > 1)}" for size in SIZES), "all"]),
                ([phase, *row, sum(row)] for phase, row in counts.items()),
            ),
            table(
                "compared | left alone | killed | verdict",
                ([what, f"`{one[:16]}`", f"`{two[:16]}`", verdict[one == two]] for what, one, two in compared),
            ),
        ]
    )


def both(kills: int, seed: int) -> str:
    """Kill in both ways, in the project's environment; the Markdown."""
    sys.path.append(str(ROOT / "tests" / "library"))
    # what is forked from this process cannot start itself again, so this process does
    flags, settings = (import_module(f"samebits.{name}") for name in ("core.flags", "config.settings"))
    flags.set_environment(settings.Determinism(cpu="portable", relax=()))
    os.nice(10)
    return chaos(kills, seed) + "\n\n" + section(PROJECT, content)


def main() -> int:
    """Exit code 0 if everything is equal, 1 if not or if a kill missed its call, 2 without strace."""
    given = arguments(__doc__, RESULT, kills=100, seed=0)
    if not shutil.which("strace"):
        print("strace: missing; kills at system calls need it: apt-get install strace", file=sys.stderr)
        return 2
    make_venv(bake(PROJECT.parent))
    printed(PROJECT, "-m", "samebits", "prepare")
    place, began = about(), time.monotonic()
    variables = {"REPRO_PROJECT": str(PROJECT), "MLFLOW_TRACKING_URI": f"sqlite:///{PROJECT}/chaos.db"}
    result = within(PROJECT, both, given.kills, given.seed, variables=variables)
    took = f"`make chaos KILLS={given.kills} SEED={given.seed}` took {(time.monotonic() - began) / 60:.0f} minutes."
    write(given.out, f"{place} {took}", result)
    return int("DIFFERENT" in result or MISSED in result)


if __name__ == "__main__":
    sys.exit(main())
