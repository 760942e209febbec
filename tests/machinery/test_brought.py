"""Whatever people bring gives the same bits on any world size and after a stop; the rest is refused before step 0."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from brought import CASES
from warm import PACKAGE, Warm

SCRIPT = Path(__file__).with_name("bringing.py")
BROKEN = "depends_on_the_rank"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def digests(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The digests of each case: on 1, 2 and 3 ranks, the last after a stop on 1."""
    keys = f"data.prepared={prepared}", "tracking.enabled=false", "trace.level=step"

    def train(folder: Path, mode: str, ranks: int | None) -> dict[str, Any]:
        told = folder.with_suffix(".err")
        training = Warm(PACKAGE, mode, str(folder), *keys, out=told, err=told, ranks=ranks, script=SCRIPT)
        assert training.wait() == 0, told.read_text()
        return json.loads((folder / "whole.json").read_text()) if mode == "whole" else {}

    base = tmp_path_factory.mktemp("brought")
    train(base / "stopped", "stopped", None)
    shutil.copytree(base / "stopped", base / "resumed")
    return {
        "1 rank": train(base / "one", "whole", None),
        "2 ranks": train(base / "two", "whole", 2),
        "resumed on 3 ranks": train(base / "resumed", "whole", 3),
    }


@pytest.mark.parametrize("case", [name for name in CASES if name != BROKEN])
def test_brought_keeps_its_bits(case: str, digests: dict[str, dict[str, Any]]):
    assert len({json.dumps(found[case]) for found in digests.values()}) == 1


def test_one_that_depends_on_the_rank_is_seen(digests: dict[str, dict[str, Any]]):
    assert len({json.dumps(found[BROKEN]) for found in digests.values()}) == 3


def test_cases_differ(digests: dict[str, dict[str, Any]]):
    """So no case stands for another one."""
    weights = [weights for weights, _ in digests["1 rank"].values()]
    assert len({*weights}) == len(CASES)
