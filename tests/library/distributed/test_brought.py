"""Whatever people bring gives the same bits on any world size, sharded, and after a stop; the rest is refused."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from brought import BROKEN, CASES, KINDS
from support import TESTS
from warm import PACKAGE, Warm

SCRIPT = TESTS / "bringing.py"
# What one rank does alone, and the words that name it.
UNEVEN = {
    "iterates_once_more_on_one_rank": "1 of {size} ranks iterate over it once more than the others",
    "stops_on_one_rank": "run.stop() was called on 1 of {size} ranks",
    "orders_otherwise_on_one_rank": "the ranks disagree before step 0:",
    "keeps_another_best_on_one_rank": "the ranks' objects of run.steps(state=...) differ",
    "holds_another_attribute_on_one_rank": "model.steps differs between rank 0 and rank 1",
}
# What cannot be sharded, and a word of the line that says so.
WHOLE = {
    "Adafactor": "on parts of it differ",
    "several_optimizers": "Muon",
    "optimizer_with_a_hook": "SGD has a hook, optimizer_with_a_hook.<locals>.halve, which would see",
    "optimizer_that_is_not_declared": "say so by Undeclared.elementwise = True",
    "optimizer_that_depends_on_the_shape": "Normed does not update each element by itself",
}
CALLED_OTHERWISE = {
    "two_networks_that_take_turns": "do not implement forward",
    "two_networks_in_each_step": "do not implement forward",
    "average_of_the_weights": "of a weight that is sharded",
    "several_losses": "of a weight that is sharded",
    "hook_on_a_gradient": "0.weight: has a hook (register_hook), which parallel.shard=full would drop",
    "norm_of_a_weight": "norm of a weight that is sharded over the ranks adds in another order",
    "alias_of_a_parameter": "model.tied is the parameter model.layer.weight",
    "part_that_is_called_by_itself": "has not reduced all units",
    "contrast_of_two_views": "call each unit once",
}
# Those for which sharding the optimizer is another thing than parallel.shard=full, which does that for all.
OF_OPTIMIZERS = [*KINDS, "own_optimizer_that_counts", *(name for name in WHOLE if name not in KINDS), *CALLED_OTHERWISE]
REFUSED = {"2 ranks, optimizer": WHOLE, "3 ranks, full": WHOLE | CALLED_OTHERWISE}
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def digests(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The digests of each case: on 1 rank, and on 2 after a stop on 1; and sharded."""
    keys = f"data.prepared={prepared}", "tracking.enabled=false", "trace.level=step", "parallel.micro_batches=4"

    def train(
        folder: Path, mode: str, ranks: int | None, shard: str = "none", cases: Iterable[str] = CASES
    ) -> dict[str, Any]:
        message, words = folder.with_suffix(".err"), (",".join(cases), *keys, f"parallel.shard={shard}")
        training = Warm(PACKAGE, mode, str(folder), *words, out=message, err=message, ranks=ranks, script=SCRIPT)
        assert training.wait() == 0, message.read_text()
        return json.loads((folder / "whole.json").read_text()) if mode == "whole" else {}

    base = tmp_path_factory.mktemp("brought")
    train(base / "stopped", "stopped", None)
    shutil.copytree(base / "stopped", base / "resumed")
    return {
        "1 rank": train(base / "one", "whole", None),
        "resumed on 2 ranks": train(base / "resumed", "whole", 2),
        "2 ranks, optimizer": train(base / "optimizer", "whole", 2, "optimizer", OF_OPTIMIZERS),
        "3 ranks, full": train(base / "full", "whole", 3, "full"),
    }


@pytest.mark.parametrize("case", [name for name in CASES if name not in (BROKEN, *UNEVEN)])
def test_brought_keeps_its_bits(case: str, digests: dict[str, dict[str, Any]]):
    kept = [found[case] for way, found in digests.items() if case in found and case not in REFUSED.get(way, {})]
    assert len(kept) >= 2 and len({json.dumps(each) for each in kept}) == 1 and len(kept[0]) == 2


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_sharded_is_refused_in_a_line(way: str, digests: dict[str, dict[str, Any]]):
    for case, words in REFUSED[way].items():
        (line,) = digests[way][case]
        assert words in line, line


def test_one_that_depends_on_the_rank_is_seen(digests: dict[str, dict[str, Any]]):
    whole = [found for way, found in digests.items() if way not in REFUSED]
    assert len({json.dumps(found[BROKEN]) for found in whole}) == len(whole) == 2


@pytest.mark.parametrize("case", UNEVEN)
def test_rank_that_does_otherwise_than_others_is_refused_in_a_line(case: str, digests: dict[str, dict[str, Any]]):
    for way, found in digests.items():
        if way != "1 rank" and case in found:
            (line,) = found[case]
            assert UNEVEN[case].format(size=3 if "3 ranks" in way else 2) in line.splitlines()[0]


def test_cases_differ(digests: dict[str, dict[str, Any]]):
    """So no case stands for another one."""
    weights = [found[0] for case, found in digests["1 rank"].items() if case not in UNEVEN]
    assert len({*weights}) == len(CASES) - len(UNEVEN)
