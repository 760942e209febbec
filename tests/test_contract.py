"""docs/contract.md: each guard that it claims has a test of that name, and what has none is said to be open."""

import ast
import re

from bake import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs" / "contract.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| channel", "| **"))
]


def test_each_guard_has_its_test() -> None:
    """The function stands in that file of the library's tests."""
    paths = {path.name: path for path in (ROOT / "tests" / "library").glob("*/test_*.py")}
    missing = []
    for channel, _, test in ROWS:
        if not test:
            continue
        name, function = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test).groups()
        tree = ast.parse(paths[name].read_text(encoding="utf-8"))
        if function not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{channel}: {test}")
    assert len(ROWS) > 40 and missing == []


def test_what_has_no_test_is_said_to_be_open() -> None:
    """And nothing else is."""
    assert [channel for channel, guard, test in ROWS if guard.startswith("not guarded") != (test == "")] == []
