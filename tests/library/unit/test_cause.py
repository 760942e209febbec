"""The cause of a part that differs when it is trained again is the least that makes it differ."""

from collections.abc import Callable, Sequence

import pytest

from samebits.prove import cause, setting
from samebits.prove.choice import Choice

THREE = Choice(3, 0, "none")
FULL = "parallel.shard=full"
ONE, SHARDED = Choice(1, 0, "none"), Choice(2, 0, "full")
ROWS = setting.ROWS[1:5]
PAIR = ROWS[0], ROWS[2]
Differs = Callable[[Choice, Sequence[setting.Row]], bool]


@pytest.mark.parametrize(
    ("own", "choice", "differs", "named", "means"),
    [
        (ONE, Choice(3, 1, "full"), lambda way, rows: True, cause.FRESH, cause.AGAIN),
        (ONE, Choice(3, 1, "full"), lambda way, rows: way.workers == 1, "1 loader worker", cause.APART),
        (ONE, Choice(3, 1, "full"), lambda way, rows: way.ranks == 3, "3 ranks", cause.APART),
        (ONE, Choice(3, 0, "full"), lambda way, rows: way.shard == "full", f"3 ranks, {FULL}", cause.SHARDED),
        (SHARDED, Choice(2, 0, "none"), lambda way, rows: way.shard == "none", "parallel.shard=none", cause.SHARDED),
        (SHARDED, Choice(1, 0, "none"), lambda way, rows: way.ranks == 1, "1 rank, parallel.shard=none", cause.APART),
        (ONE, Choice(3, 0, "none"), lambda way, rows: ROWS[1] in rows, ROWS[1].name, ROWS[1].means),
        (ONE, ONE, lambda way, rows: {*PAIR} <= {*rows}, f"{PAIR[0].name}, {PAIR[1].name}", "together"),
        (ONE, THREE, lambda way, rows: way.ranks == 3 and PAIR[0] in rows, f"3 ranks, {PAIR[0].name}", ""),
    ],
)  # fmt: skip
def test_least_that_differs_is_named(own: Choice, choice: Choice, differs: Differs, named: str, means: str):
    found, line = cause.cause_of(choice, own, ROWS, differs, True, list)
    assert found == named and means in line


@pytest.mark.parametrize(("differing", "named"), [(3, True), ("full", False)])
def test_what_has_changed_is_named_where_it_may_be_why(differing: object, named: bool):
    def differs(way: Choice, rows: Sequence[setting.Row]) -> bool:
        return differing in (way.ranks, way.shard)

    _, line = cause.cause_of(Choice(3, 0, "full"), ONE, ROWS, differs, False, lambda: ["model.calls"])
    assert ("model.calls" in line) == named
