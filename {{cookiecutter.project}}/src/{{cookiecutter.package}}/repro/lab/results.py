"""results.lock and dvc.lock: what a run is expected to give, and whether this one gave it.

results.lock is YAML: `tolerance` by metric, and `results`, one row per (content address, environment
class) with the SHA-256 of the weights, the metrics, and where they come from.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ..address import PROJECT
from ..errors import Failure, Refused
from ..files import read_json
from ..manifest import sha256_file
from ..record import ADDRESS, ENVIRONMENT, METRICS, WEIGHTS

RESULTS, OUTPUTS = "results.lock", "dvc.lock"


@dataclass(frozen=True)
class Verdict:
    """Whether the outcome is the expected one, and the sentence that says how that was decided."""

    holds: bool
    sentence: str


def check(out: Path, project: Path = PROJECT) -> list[Verdict]:
    """Compare a finished run with results.lock and, where DVC made it, with the committed dvc.lock.

    Raises:
        Refused: no finished run in `out`, or a lock is missing.
    """
    outcome = _outcome(out)
    expected = _yaml(project / RESULTS)
    committed = [_committed(project)] if _made_by_dvc(out, project) else []
    same_address = [row for row in expected["results"] if row["address"] == outcome["address"]]
    same_class = [row for row in same_address if row["environment"] == outcome["environment"]]
    if same_class:
        return [_bits(outcome, same_class[0]), *committed]
    if same_address:
        return [_metrics(outcome, same_address[0], project)]
    return [Verdict(True, _unknown(outcome, expected["results"])), *committed]


def _made_by_dvc(out: Path, project: Path) -> bool:
    stages = _yaml(project / OUTPUTS)["stages"].values()
    outputs = {(project / output["path"]).resolve() for stage in stages for output in stage.get("outs", [])}
    return (out / WEIGHTS).resolve() in outputs


def _outcome(out: Path) -> dict[str, Any]:
    for name in (ADDRESS, ENVIRONMENT, METRICS, WEIGHTS):
        if not (out / name).is_file():
            raise Refused(f"{out / name}: missing; a finished run is wanted. Train first: make repro")
    address = read_json(out / ADDRESS)
    return {
        "address": address["address"],
        "parts": address["parts"],
        "environment": read_json(out / ENVIRONMENT)["class"],
        "metrics": read_json(out / METRICS),
        "weights": sha256_file(out / WEIGHTS),
    }


def _bits(outcome: dict[str, Any], row: dict[str, Any]) -> Verdict:
    if outcome["weights"] == row["weights"]:
        return Verdict(True, f"reproduced bit for bit: {row['source']} (weights {row['weights']})")
    return Verdict(
        False,
        f"DIFFERS: weights {outcome['weights']}, expected {row['weights']}: {row['source']}. "
        f"Same content address, same environment class ({outcome['environment']}): this should not happen",
    )


def within_tolerance(seen: dict[str, Any], expected: dict[str, Any], project: Path = PROJECT) -> tuple[bool, str]:
    """Whether metrics are as near to the expected ones as results.lock tolerates, and both in words."""
    tolerance = _yaml(project / RESULTS)["tolerance"]
    pairs = {name: (float(seen[name]), float(expected[name])) for name in tolerance}
    holds = all(abs(one - other) <= tolerance[name] for name, (one, other) in pairs.items())
    shown = (f"{name} {one:.4f} (expected {other:.4f} +- {tolerance[name]:g})" for name, (one, other) in pairs.items())
    return holds, ", ".join(shown)


def _metrics(outcome: dict[str, Any], row: dict[str, Any], project: Path) -> Verdict:
    holds, shown = within_tolerance(outcome["metrics"], row["metrics"], project)
    verdict = "metrics within tolerance" if holds else "METRICS DIFFER"
    return Verdict(
        holds,
        f"{verdict}: {shown}. Bits are not promised here: this machine is of class "
        f"{outcome['environment']}, the result of class {row['environment']}. "
        f"The expected outputs' lock comes back with: git checkout {OUTPUTS}",
    )


def accept(out: Path, source: str, project: Path = PROJECT) -> str:
    """Make the outcome of a finished run what is expected of its content address in its environment class.

    Returns what was done, in a sentence.

    Raises:
        Refused: no finished run in `out`.
        Failure: something else is expected there already.
    """
    outcome = _outcome(out)
    expected = _yaml(project / RESULTS, "rt")
    for row in expected["results"]:
        if (row["address"], row["environment"]) == (outcome["address"], outcome["environment"]):
            if row["weights"] == outcome["weights"]:
                return f"{RESULTS} expects these weights already: {row['source']}"
            raise Failure(
                f"{RESULTS} expects weights {row['weights']} of this content address in this environment class, "
                f"{outcome['weights']} seen: this should not happen. If the row is wrong, remove it and accept again"
            )
    columns = ("address", "parts", "environment", "weights", "metrics")
    expected["results"].append({"source": source} | {name: outcome[name] for name in columns})
    lines = YAML()
    lines.indent(mapping=2, sequence=4, offset=2)
    lines.width = 1000
    with (project / RESULTS).open("w") as file:
        lines.dump(expected, file)
    return f"{RESULTS} expects weights {outcome['weights']} of content address {outcome['address']}; commit it"


def _unknown(outcome: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    sentence = f"content address {outcome['address'][:16]} has no expected result in {RESULTS}"
    if not rows:
        return sentence
    other = [name for name, part in rows[0]["parts"].items() if part != outcome["parts"].get(name)]
    return f"{sentence}; another {' and '.join(other)} than {rows[0]['source']}"


def _committed(project: Path) -> Verdict:
    """Whether dvc.lock still says what was committed: DVC rewrites it in silence when outputs differ."""
    shown = subprocess.run(["git", "show", f"HEAD:./{OUTPUTS}"], cwd=project, capture_output=True, text=True)
    if shown.returncode:
        return Verdict(False, f"{OUTPUTS}: not committed, so there is nothing to compare with: git add and commit it")
    if YAML(typ="safe").load(shown.stdout) == _yaml(project / OUTPUTS):
        return Verdict(True, f"the outputs are those of the committed {OUTPUTS}")
    return Verdict(
        False,
        f"the outputs are not those of the committed {OUTPUTS}: commit it if you meant that, "
        f"else look at: git diff {OUTPUTS}",
    )


def _yaml(path: Path, kind: str = "safe") -> Any:
    if not path.is_file():
        raise Refused(f"{path}: missing. Restore it with: git checkout {path.name}")
    return YAML(typ=kind).load(path.read_text())
