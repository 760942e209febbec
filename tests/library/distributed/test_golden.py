"""The golden set: core's arithmetic changes if and only if the integer in core/ARITHMETIC does."""

import json
from pathlib import Path
from typing import Any

import golden
import numpy
import pytest
import torch
from support import TESTS
from warm import Warm

from samebits.core import ARITHMETIC

FAULTS = "tree", "seeds", "order", "norm"
GOLDEN: dict[str, Any] = json.loads(golden.GOLDEN.read_text())
STORED = {name: GOLDEN["digests"][f"networks/{name}"] for name in golden.NETWORKS}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of all cases that need no compiler, and of each network with each planted change."""
    folder = tmp_path_factory.mktemp("golden")
    faults = [f"{network},1,none,0,float32,,{fault}" for network in golden.NETWORKS for fault in FAULTS]
    cases = [*golden.network_cases(), *golden.half_cases(), *faults]
    out, log = folder / "digests.json", folder / "log"
    script = TESTS / "golden_networks.py"
    training = Warm(str(out), *cases, out=log, err=log, ranks=golden.MAX_RANKS, script=script, grace=0)
    assert training.wait() == 0, log.read_text()
    return dict(json.loads(out.read_text()))


def test_networks_give_the_stored_digest_on_each_world(digests: dict[str, str]):
    """With each `shard` and a loader worker; the advice is in docs/contributing.md."""
    actual = golden.by_network({case: digests[case] for case in golden.network_cases()})
    assert actual == {name: {row["digest"]} for name, row in STORED.items()}, "see: make golden"
    packages = f"{torch.__version__.partition('+')[0]} {numpy.__version__}"
    assert {row["inputs"] for row in STORED.values()} == {golden.network_inputs(packages)}, "see: make golden"


def test_bfloat16_gives_one_digest_in_two_worlds(digests: dict[str, str]):
    actual = golden.by_network({case: digests[case] for case in golden.half_cases()})
    assert {name: len(found) for name, found in actual.items()} == dict.fromkeys(
        (f"{name}/bfloat16" for name in golden.NETWORKS), 1
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_change_of_the_arithmetic_changes_a_stored_digest(digests: dict[str, str], fault: str):
    """A network whose loop does not use the changed function keeps its digest."""
    changed = {name for name, row in STORED.items() if digests[f"{name},1,none,0,float32,,{fault}"] != row["digest"]}
    assert changed == {*golden.NETWORKS} - ({"gan"} if fault == "norm" else set())


def test_committed_digests_and_integers_agree():
    assert GOLDEN["arithmetic"] == ARITHMETIC
    assert golden.conflicts(GOLDEN, golden.committed_versions()) == []


def version(arithmetic: int, **digests: str) -> dict[str, Any]:
    """Return a golden set of these rows; a value is the inputs, a slash, and the digest."""
    pairs = {name: value.split("/") for name, value in digests.items()}
    rows = {name: {"inputs": inputs, "digest": digest} for name, (inputs, digest) in pairs.items()}
    return {"arithmetic": arithmetic, "digests": rows}


FIRST = version(1, a="x/1", b="x/2")


@pytest.mark.parametrize(
    ("current", "earlier", "line"),
    [
        (version(1, a="x/1", b="x/9"), [FIRST], "b: the digest changes and core/ARITHMETIC stays 1: raise it"),
        (version(2, a="x/1", b="x/2"), [FIRST], "core/ARITHMETIC: 1 -> 2, and no golden digest changes: put 1 back"),
        (version(2, a="y/1", b="y/9"), [FIRST], "core/ARITHMETIC: 1 -> 2, and no golden digest changes: put 1 back"),
        (version(1, a="x/1"), [FIRST, version(2, a="x/9")], ""),
        (version(2, a="x/9", b="x/2"), [FIRST], ""),
        (version(1, a="y/9", b="x/2", c="x/3"), [FIRST], ""),
        (version(1, b="x/2"), [FIRST], ""),
        # A commit changed the digest only, and the next one raised the integer.
        (version(2, a="x/9"), [FIRST, version(1, a="x/9")], ""),
        (FIRST, [FIRST], ""),
        (FIRST, [], ""),
    ],
)
def test_conflict_of_digests_and_integer_is_found(current: Any, earlier: Any, line: str):
    assert golden.conflicts(current, earlier) == ([line] if line else [])


def test_commits_of_the_golden_set_are_read_from_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from clone import commit

    monkeypatch.setattr(golden, "ROOT", tmp_path)
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "golden.json")
    versions = [FIRST, version(1, a="x/9")]
    for each in versions:
        golden.GOLDEN.write_text(json.dumps(each))
        commit(tmp_path)
    assert golden.committed_versions() == versions
    assert golden.conflicts(versions[1], golden.committed_versions()) != []
