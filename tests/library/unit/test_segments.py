"""Which parts of a run are trained again."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from samebits.config.settings import Prove
from samebits.core.plan import Plan
from samebits.prove import room, setting
from samebits.prove.segments import Segment, chosen

ADDRESS = "a" * 64


def of(length: int, first: int = 0, samples: int = 100, address: str = ADDRESS, **keys: Any) -> list[Segment]:
    """The segments of a run with global batches of 8 samples."""
    return chosen(address, first, first + length, Plan(samples, 8, 4, 0).next_end, Prove(**keys))


@pytest.mark.parametrize("steps", [*range(1, 30), 100, 1000, 12345])
@pytest.mark.parametrize("first", [0, 7])
def test_segments_lie_within_the_run_and_none_twice(steps: int, first: int):
    found = of(steps, first)
    assert found[0].first == first and all(first <= each.first < each.stop <= first + steps for each in found)
    assert all(one.first < other.first for one, other in pairwise(found))


def test_one_begins_one_crosses_an_epochs_end_and_one_is_the_end():
    begin, end, last = of(600)
    assert begin == Segment(0, 3) and end.first <= 12 < end.stop - 1  # 13 steps, 0 to 12, make the first epoch
    assert last == Segment(597, 600)


@pytest.mark.parametrize("samples", [10**6, 80])
def test_run_of_at_most_one_epoch_has_its_middle_in_place_of_an_epochs_end(samples: int):
    assert of(10, samples=samples) == [Segment(0, 3), Segment(3, 6), Segment(7, 10)]


@pytest.mark.parametrize(
    ("steps", "samples", "soon"),
    [(10, 10**6, Segment(3, 6)), (600, 3000, Segment(6, 9)), (10**6, 10**9, Segment(10000, 13334)), (600, 100, None)],
)
def test_early_proof_has_a_place_behind_the_first_hundredth_of_the_run_where_its_first_epoch_ends_later(
    steps: int, samples: int, soon: Segment | None
):
    """So what a run forgets is found before most of it has been trained."""
    late, early = of(steps, samples=samples), of(steps, samples=samples, when="early")
    assert {*early} == {*late, *filter(None, [soon])} and early[1] == (soon or late[1])


def test_they_have_one_in_a_hundred_steps_or_nine_unless_a_key_says_how_many():
    def count(found: list[Segment]) -> int:
        return sum(each.stop - each.first for each in found)

    assert [count(of(steps)) for steps in (600, 6000)] == [9, 60]
    assert count(of(600, steps=30)) == 30 and count(of(600, segments=1)) == 9


def test_more_are_drawn_from_the_address():
    assert of(6000) == of(6000) == of(6000, address="b" * 64)
    assert len({of(6000, address=f"{number}", segments=4)[2] for number in range(20)}) > 10
    more = of(6000, segments=20, steps=60)
    assert len(more) > 15 and min(each.first for each in more[2:]) < 1000


V1 = "4:memory:/job/step\n1:cpu:/job\n0::/\n"
V2 = "0::/job/step\n"


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        (V2, {"job": ("max", 70, 5), "job/step": ("100", 60, 10)}, [50]),
        (V2, {"job": ("90", 70, 5), "job/step": ("100", 60, 10)}, [50, 25]),
        (V2, {"": ("100", 60, 10)}, [50]),  # of a container, which sees its own group as the root
        (V1, {"memory/job": ("90", 70, 5), "memory": ("200", 90, 0)}, [25, 110]),
        (V1, {"job": ("90", 70, 5)}, []),
    ],
)
def test_memory_that_a_job_or_a_container_has_left_is_known(
    own: str, files: dict[str, tuple[str, int, int]], left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(room, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(room, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    _, limit, used, cached = room.MEMORY["memory" if own == V1 else ""]
    for name, (most, now, back) in files.items():
        group = tmp_path / "groups" / name
        group.mkdir(parents=True, exist_ok=True)
        for file, text in ((limit, most), (used, str(now)), ("memory.stat", f"anon 1\n{cached} {back}\n")):
            (group / file).write_text(text + "\n" * (file == "memory.stat"))
    assert room.left() == left


def test_variable_whose_name_only_begins_like_one_that_is_kept_is_taken_away(tmp_path: Path):
    """Such as an owner's path to data, which a run could read."""
    kept = dict.fromkeys(
        ["PATH", "HOME", "OMP_NUM_THREADS", "PYTHONHASHSEED", "SAMEBITS_PROVE", "LD_LIBRARY_PATH"], "1"
    )
    others = dict.fromkeys(["PATH_TO_DATA", "HOME_OF_DATA", "LANGUAGE_MODEL", "TZ_OF_DATA", "DATA"], "1")
    row = next(row for row in setting.ROWS if row.name == setting.VARIABLES)
    assert row.variables(kept | others, tmp_path) == kept
