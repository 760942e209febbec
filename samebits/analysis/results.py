"""results.lock: the expected results of a run, and the comparison with a finished one.

results.lock is YAML: `tolerance` by metric, and `results`, one row per (content address, environment
class) with the SHA-256 of the weights, the metrics, and where they come from. `perturbation`, if it is there, says by
metric how far a change of one ULP may move it, and `trial` how far a new default may move things.
"""

import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ..address import manifest
from ..address.address import address_differences, content_address
from ..base.files import read_json
from ..base.forms import ABSENT, Form
from ..base.project import Project
from ..base.shape import shown
from ..base.text import differences, short, some
from ..config.settings import Settings
from ..config.yaml_file import read_yaml
from ..core.arithmetic import is_earlier, is_edited
from ..core.errors import RunError, UserError
from ..guards import stages
from ..record.classes import promises
from ..record.names import ADDRESS, METRICS, WEIGHTS
from ..record.reading import Number
from ..record.receipt import Receipt, read
from ..record.view import LATER, is_stated, other_metrics
from . import outputs
from .outputs import OUTPUTS

RESULTS = "results.lock"
EVALUATION = "evaluation.json"  # what the stage of that name finds of the weights beside it
RELEASED = "the digest this template was released with"  # the source of a starter's own row
STEPS = "steps"  # a metric that the library counts, and that no run of one content address can vary
SHOWN = 4  # differences that a sentence names
AGAIN = "Train again: make repro, or dvc repro --force where DVC sees no change"


class Row(Form):
    """An expected result."""

    source: str
    address: str
    parts: dict[str, str]
    environment: str
    weights: str
    metrics: dict[str, Number]


class Trial(Form):
    """The ranges of a trial: from, to; null is no bound."""

    same_bits: bool
    seconds: list[float | None]
    memory: list[float | None]
    metrics: dict[str, list[float | None]]


class Lock(Form):
    """What results.lock holds."""

    tolerance: dict[str, Any] | None
    perturbation: dict[str, Any] | None = None
    trial: Trial = ABSENT
    results: list[Row] | None


@dataclass(frozen=True)
class Verdict:
    """Whether the outcome is the expected one, and the sentence that says how that was decided."""

    holds: bool
    sentence: str


def check(project: Project, config: Settings, out: Path) -> list[Verdict]:
    """Whether a finished run is one of the project as it stands, and gave what results.lock and dvc.lock expect.

    `config` is what the project asks for now. dvc.lock counts where DVC made the run.

    Raises:
        UserError: no finished run in `out`, or a lock is missing.
        RunError: the receipt of the run was altered.
    """
    run = _finished(out)
    rows = lock(project)["results"] or []
    if faults := [*_foreign(out, run), *_stale(project, config, out, run)]:
        return faults
    locked = outputs.stages(project)
    by_dvc = outputs.made_by_dvc(project, locked, out)
    left = _left_over(out, run, outputs.left_over(project, locked) if by_dvc else [])
    committed = [*left, *([Verdict(*outputs.committed(project, locked))] if by_dvc else [])]
    same_address = [row for row in rows if row["address"] == run.stated["address"]]
    same_class = [row for row in same_address if row["environment"] == run.stated["environment"]["class"]]
    if same_class and promises(run.stated["environment"]["class"]):
        return [_bits(run, same_class[0]), *committed]
    if same_address:
        return [_metrics(project, run, same_address[0]), *left]
    command = f"samebits accept {shlex.quote(os.path.relpath(out, project.root))} --source WORDS"
    return [Verdict(True, f"{_unknown(run, rows)}. To expect this result: {command}"), *committed]


def _finished(out: Path) -> Receipt:
    try:
        return read(out)
    except UserError as refused:
        raise UserError(f"{refused}. {AGAIN}") from None


def _foreign(out: Path, run: Receipt) -> list[Verdict]:
    """The verdict on files that are not those of the run whose receipt lies beside them, where there are any.

    DVC and git bring back single files of an earlier run, such as its weights, and leave the later one's receipt.
    """
    foreign = [name for name in (WEIGHTS, METRICS, ADDRESS) if not is_stated(run, name)]
    if not foreign:
        return []
    said = f"FOREIGN: {some(foreign)} in {out}: not of the run whose {run.path.name} lies there: missing, altered, or "
    return [Verdict(False, f"{said}brought back by DVC or git from another run. {AGAIN}")]


def _stale(project: Project, config: Settings, out: Path, run: Receipt) -> list[Verdict]:
    """Return a verdict on a run that the project as it stands would not make; none if it would make this run."""
    data = manifest.require_sound(config.data)  # prepared with other keys: a difference to name
    address = content_address(project, config, data)
    recorded = run.stated.get("config", {})
    environment = {key: recorded.get(key, LATER.get(key)) for key in config.environmental()}
    differing = address_differences(run.stated, address.record())
    differing += differences(environment, config.environmental())
    if not differing:
        return []
    shown = some([f"{d.field}: {short(d.one, 24)} then, {short(d.other, 24)} now" for d in differing], SHOWN)
    sentences = [f"STALE: {out} is not a run of the project as it stands now ({shown})", AGAIN]
    if is_earlier(run.stated["preimage"].get("core", {})):
        sentences[1] += f". Or repeat the old run with the library of its commit: samebits replay {run.path}"
    elif is_edited(address.preimage["core"]):
        sentences += stages.core_unlisted(project)
    sentences.append("If you trained with --set, give check the same --set")
    return [Verdict(False, ". ".join(sentences))]


def _left_over(out: Path, run: Receipt, locked: list[str]) -> list[Verdict]:
    """The verdict on an evaluation of other weights than the run's; dvc.lock knows such files, or the file says so."""
    path = out / EVALUATION
    held = read_json(path, remedy="Evaluate again: make repro") if path.is_file() else {}
    of = str(held.get("weights")) if isinstance(held, dict) else ""
    if not (left := locked or ([str(path)] if re.fullmatch("[0-9a-f]{64}", of) and of != run.weights else [])):
        return []
    said = f"STALE: {some(left)}: left from an older run, made from other weights or data than lie there now"
    return [Verdict(False, f"{said}. Evaluate again: make repro, or the stage evaluate with --out {out}")]


def _differing(run: Receipt, row: dict[str, Any]) -> str:
    """The weights, or else the metrics, where they are not the expected ones; empty where they are."""
    if run.weights != row["weights"]:
        return f"weights {run.weights}, expected {row['weights']}"
    return other_metrics(run.stated["metrics"], row["metrics"], "seen", "expected")


def _bits(run: Receipt, row: dict[str, Any]) -> Verdict:
    if not (differing := _differing(run, row)):
        return Verdict(True, f"reproduced bit for bit: {row['source']} (weights {row['weights']})")
    return Verdict(
        False,
        f"DIFFERS: {differing}: {row['source']}. "
        f"Same content address, same environment class ({row['environment']}): this breaks the contract",
    )


def within_tolerance(project: Project, seen: dict[str, Any], expected: dict[str, Any]) -> tuple[bool, str]:
    """Whether metrics are as near to the expected ones as results.lock tolerates, and that with both in words.

    Raises:
        UserError: the run, the expected result and the tolerance are not of the same metrics, or one is no number.
    """
    tolerance = lock(project)["tolerance"] or {}
    names = [sorted({*metrics} - {STEPS}) for metrics in (tolerance, seen, expected)]
    if names[0] != names[1] or names[0] != names[2] or not names[0]:
        wanted, have, other = (some(each, 9) or "none" for each in names)
        raise UserError(
            f"{RESULTS}: metrics cannot be compared: tolerance is of {wanted}; the run has {have}, the expected result "
            f"{other}. Name the same metrics in each"
        )
    if wrong := [name for name in names[0] if not isinstance(tolerance[name], int | float)]:
        raise UserError(f"{RESULTS}: tolerance of {wrong[0]}: {tolerance[wrong[0]]!r} seen, a number wanted")
    pairs = {name: (float(seen[name]), float(expected[name])) for name in names[0]}
    holds = all(abs(one - other) <= tolerance[name] for name, (one, other) in pairs.items())
    shown = (f"{name} {one:.4f} (expected {other:.4f} +- {tolerance[name]:g})" for name, (one, other) in pairs.items())
    return holds, f"{'metrics within tolerance' if holds else 'METRICS DIFFER'}: {', '.join(shown)}"


def accepted_change(project: Project) -> tuple[str, dict[str, float]]:
    """How far a change of one ULP may move each metric, and the key that says so: `perturbation`, or `tolerance`.

    Raises:
        UserError: results.lock is missing, neither key names a metric, or a value is no number from 0 on.
    """
    held = lock(project)
    key = "perturbation" if held.get("perturbation") is not None else "tolerance"
    if not (accepted := held[key]):
        raise UserError(
            f"{RESULTS}: {key} names no metric; say how far each may move, as in `{key}: {{accuracy: 0.02}}`"
        )
    for name, value in accepted.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(f"{RESULTS}: {key} of {shown(name)}: {shown(value)} seen, a number from 0 on wanted")
    return key, {str(name): float(value) for name, value in accepted.items()}


def _metrics(project: Project, run: Receipt, row: dict[str, Any]) -> Verdict:
    holds, said = within_tolerance(project, run.stated["metrics"], row["metrics"])
    return Verdict(
        holds,
        f"{said}. Equal bits are not guaranteed here: this machine is of class "
        f"{run.stated['environment']['class']}, the result of class {row['environment']}. "
        f"The expected outputs' lock comes back with: git checkout {OUTPUTS}",
    )


def accept(project: Project, out: Path, source: str) -> str:
    """Make the outcome of a finished run what is expected of its content address in its environment class.

    Returns what was done, in a sentence.

    Raises:
        UserError: no finished run in `out`.
        RunError: its files are not those of its receipt, or something else is expected there already.
    """
    run = _finished(out)
    if foreign := _foreign(out, run):
        raise RunError(foreign[0].sentence)
    address, environment = run.stated["address"], run.stated["environment"]["class"]
    expected = lock(project, "rt")
    expected["results"] = expected["results"] or []  # that nobody has accepted any is no fault
    for row in expected["results"]:
        if (row["address"], row["environment"]) == (address, environment):
            if not (differing := _differing(run, row)):
                return f"{RESULTS} expects these weights and metrics already: {row['source']}"
            raise RunError(
                f"{RESULTS} expects another outcome of this content address in this environment class ({differing}): "
                f"this breaks the contract. If the row is wrong, remove it and accept again"
            )
    expected["results"].append(
        {
            "source": source,
            "address": address,
            "parts": run.stated["parts"],
            "environment": environment,
            "weights": run.weights,
            "metrics": run.stated["metrics"],
        }
    )
    lines = YAML()
    lines.indent(mapping=2, sequence=4, offset=2)
    lines.width = 1000
    with (project.root / RESULTS).open("w") as file:
        lines.dump(expected, file)
    return f"{RESULTS} expects weights {run.weights} of content address {address}; commit it"


def _unknown(run: Receipt, rows: list[dict[str, Any]]) -> str:
    sentence = f"content address {run.stated['address'][:16]} has no expected result in {RESULTS}"
    if not rows:
        return sentence
    other = [name for name, part in rows[0]["parts"].items() if part != run.stated["parts"].get(name)]
    return f"{sentence}; another {' and '.join(other)} than {rows[0]['source']}"


def lock(project: Project, kind: str = "safe") -> Any:
    """What results.lock holds; of the kind `rt` it can be written again with its comments.

    Raises:
        UserError: it is missing, or has another shape.
    """
    return read_yaml(project.root / RESULTS, Lock, f"Restore it with: git checkout {RESULTS}", kind)
