"""docs/contract.md: each guard that it claims has a test of that name, and what nobody prevents or finds is said so."""

import ast
import re
from dataclasses import fields

from bake import ROOT

from samebits.analysis import controls
from samebits.checkpoint.repeated import Repeated
from samebits.prove import cause, fresh, setting
from samebits.prove.choice import Choice

LINES = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs" / "contract.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| channel")
]
ROWS = [row for row in LINES if not row[0].startswith("**")]
NOTHING = "\N{EN DASH}"
FINDERS = {
    *(row.name for row in setting.ROWS),
    *(field.name for field in fields(Choice)),
    *(fresh.ELSEWHERE, cause.FRESH, Repeated.name, controls.SEED, controls.TAKEN),
}


def test_each_guard_has_its_test() -> None:
    """The function stands in that file of the library's tests, or of those of hosts."""
    places = "library/**/test_*.py", "hosts/test_*.py"
    paths = {path.name: path for place in places for path in (ROOT / "tests").glob(place)}
    missing = []
    for channel, _, _, test in ROWS:
        if not test:
            continue
        name, function = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test).groups()
        tree = ast.parse(paths[name].read_text(encoding="utf-8"))
        if function not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{channel}: {test}")
    assert len(ROWS) > 40 and missing == []


def test_what_finds_a_fault_is_part_of_the_library() -> None:
    """By the names that it has there; and each circumstance finds something."""
    seen = {name for _, _, found, _ in ROWS if found != NOTHING for name in found.split(", ")}
    assert seen <= FINDERS and seen >= {row.name for row in setting.ROWS}


def test_what_has_no_test_is_said_to_be_open() -> None:
    """And nothing else is."""
    assert [channel for channel, guard, _, test in ROWS if guard.startswith("not guarded") != (test == "")] == []


def test_what_is_neither_prevented_nor_found_is_not_promised() -> None:
    """And nothing else stands there."""
    last = LINES.index(["**not promised**", "", "", ""])
    assert LINES[last + 1 :] == [row for row in ROWS if row[1].startswith("not guarded") and row[2] == NOTHING]
