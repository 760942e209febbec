"""Ranks that differ are named before step 0: the table first, then real ranks with a fault planted in one."""

import dataclasses
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from clone import copied
from faulty import Faulty
from project.config import Config
from support import PACKAGE, PROJECT, prepare_here

from samebits.address import manifest
from samebits.base.text import flatten
from samebits.core.errors import Disagreement
from samebits.guards.agreement import require_agreement
from samebits.guards.disagreement import blame, disagreements, ranges, table

# ---- the table


def report(**fields: Any) -> dict[str, Any]:
    return {"torch": "2.13.0", "threads": 1} | fields


def test_equal_reports_are_no_disagreement():
    assert disagreements([report() for _ in range(5)], list("abcde")) == []


def test_table_groups_values_with_the_most_common_first():
    reports = [report(threads=2), report(), report(), report(torch="2.12.0"), report()]
    groups = disagreements(reports, ["a", "a", "a", "b", "b"])
    assert table(groups).splitlines() == [
        "field    value   ranks  hosts",
        "threads  1       1-4    a, b",
        "threads  2       0      a",
        "torch    2.13.0  0-2,4  a, b",
        "torch    2.12.0  3      b",
    ]
    assert blame(groups, 5) == "against the majority: rank 0,3 on a, b"


def test_field_that_only_some_ranks_have_is_a_disagreement():
    groups = disagreements([report(), report(), report(NCCL_ALGO="Ring")], list("abc"))
    assert [(g.field, g.value, g.ranks, g.hosts) for g in groups] == [
        ("NCCL_ALGO", None, (0, 1), ("a", "b")),
        ("NCCL_ALGO", "Ring", (2,), ("c",)),
    ]


def test_values_of_another_type_are_other_values():
    assert len(disagreements([{"x": 1}, {"x": "1"}, {"x": True}, {"x": 1.0}], list("abcd"))) == 4


@pytest.mark.parametrize(
    "reports",
    [
        [report(), report(threads=2)],
        [report(), report(), report(threads=2), report(threads=2)],
        [report(threads=n) for n in range(5)],
        # majorities on either field, but together they leave out most ranks
        [report(threads=2), report(threads=3), report(), report(torch="2.12.0"), report(torch="2.11.0")],
        # a majority on one field, none on the other
        [report(threads=2, torch="1"), report(torch="2"), report(torch="3")],
    ],
)
def test_nobody_is_blamed_without_a_majority(reports: list[dict[str, Any]]):
    groups = disagreements(reports, ["host"] * len(reports))
    assert groups and blame(groups, len(reports)) == "no value has a majority on its side, so no rank is blamed"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([0, 1, 2], "0-2"), ([1, 3, 4, 9], "1,3-4,9"), ([0, 2], "0,2"), (range(1024), "0-1023")],
)
def test_ranks_are_shown_as_ranges(ranks: list[int], text: str):
    assert ranges(ranks) == text


def test_nested_fields_are_named_by_their_path():
    assert flatten({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None}) == {"a.b.c": 1, "a.d": [1, 2], "e": None}


def test_long_values_are_shown_from_where_they_differ():
    paths = ["/opt/" + "long/" * 20 + end for end in ("one", "one", "two")]
    lines = table(disagreements([{"x": p} for p in paths], list("abc"))).splitlines()
    assert [line.split()[1][-3:] for line in lines[1:]] == ["one", "two"]
    assert max(map(len, lines)) < 70


@dataclasses.dataclass
class Heard:
    """A world of a thousand ranks, of which one hears what each sends; the last rank reports what `odd` holds, too."""

    odd: dict[str, Any]
    size, place = 1000, "host cpu"
    sent: list[Any] = dataclasses.field(default_factory=list)

    def gather(self, value: Any) -> list[Any]:
        """What this rank sends, from all; the last one sends its own."""
        self.sent.append(value)
        other = (value[0], value[1] | self.odd) if isinstance(value, tuple) else "0" * 64 if self.odd else value
        return [value] * (self.size - 1) + [other]


def test_reports_are_sent_only_where_their_digests_differ():
    whole = {f"field {number}": "x" * 64 for number in range(200)}
    alike, apart = Heard({}), Heard({"field 7": "y"})
    require_agreement(whole, alike, "before:")
    assert [len(sent) for sent in alike.sent] == [64]
    with pytest.raises(Disagreement, match=r"(?s)^before:.*field 7.*against the majority: rank 999 on host cpu$"):
        require_agreement(whole, apart, "before:")
    assert apart.sent[1] == ("host cpu", whole)


def crowd(**odd: Any) -> list[dict[str, Any]]:
    """1024 ranks' reports of 200 fields; those whose rank stands in an odd field's dict differ there."""
    common = {f"field{n}": f"{n:064x}" for n in range(200)}
    reports = [dict(common) for _ in range(1024)]
    for field, values in odd.items():
        for rank, value in values.items():
            reports[rank][field] = value
    return reports


HOSTS = [f"node{rank // 8:03d} cuda:{rank % 8}" for rank in range(1024)]


def test_1024_ranks_are_compared_in_a_second_and_told_in_a_few_lines():
    reports = crowd(field3={517: "odd"}, field9=dict.fromkeys(range(64, 72), "older"), field77={3: "x", 900: "y"})
    start = time.process_time()  # of this process alone, so that a busy machine fails no test
    groups = disagreements(reports, HOSTS)
    text = table(groups) + "\n" + blame(groups, 1024)
    assert time.process_time() - start < 1
    lines = text.splitlines()
    assert len(lines) == 9 and max(map(len, lines)) < 150, text
    assert lines[2].split() == ["field3", "odd", "517", "node064", "cuda:5"]
    assert [line.split()[2] for line in lines[3:6]] == ["0-2,4-899,901-1023", "3", "900"]
    assert lines[-1].startswith("against the majority: rank 3,64-71,517,900 on node")


def all_different(ranks: int) -> list[dict[str, Any]]:
    """Reports in which all values differ but those of one field, in which ranks fall into many pieces."""
    reports = [{f"field{n}": f"{rank * 1000 + n:064x}" for n in range(200)} for rank in range(ranks)]
    for rank in range(0, ranks, 2):
        reports[rank]["field0"] = "even"
    return reports


def quickest(work: Callable[[], Any]) -> float:
    """The seconds of this process alone that work takes, the better of two."""
    took = []
    for _ in range(2):
        start = time.process_time()
        work()
        took.append(time.process_time() - start)
    return min(took)


@pytest.mark.long
def test_1024_ranks_that_all_differ_everywhere_are_told_in_a_few_lines_too():
    reports = all_different(1024)

    def message() -> str:
        groups = disagreements(reports, HOSTS)
        return table(groups) + "\n" + blame(groups, len(reports))

    # a hundred times, as with 256 ranks; a search through the ranks for each rank would make it more than two hundred
    text, sorting = message(), quickest(lambda: sorted(value for report in reports for value in report.values()))
    assert quickest(message) < 200 * sorting
    lines = text.splitlines()
    assert len(lines) < 70 and max(map(len, lines)) < 150, text
    assert "0,2,4,6,8,10,12,14,… (512 ranks)" in lines[1]
    assert "(509 other values)" in lines[5]
    assert lines[-2:] == ["and 188 more fields", "no value has a majority on its side, so no rank is blamed"]


# ---- real ranks


Run = Callable[..., Faulty]


@pytest.fixture
def run(tmp_path: Path, prepared: Path) -> Run:
    """A function that trains with one rank at fault."""

    def start(fault: str, at: int, ranks: int, *settings: str, **env: str) -> Faulty:
        sets = "tracking.enabled=false", f"data.prepared={prepared}", *settings
        return Faulty(PACKAGE, tmp_path / f"{fault}{at}", fault, at, ranks, *sets, **env)

    return start


def assert_stopped_before_step_0(run: Faulty, ranks: int) -> None:
    assert run.codes == dict.fromkeys(range(ranks), "4"), run.message
    assert run.code != 0
    assert run.message.count("field ") == 1 and "]: Traceback" not in run.message
    assert run.steps() == 0 and not list(run.out.glob("checkpoints/*"))


HOST = [socket.gethostname(), "cpu"]


@pytest.mark.long
def test_rank_with_another_library_stops_all(run: Run):
    """And with another variable."""
    ran = run("library+variable", 0, 3)
    assert_stopped_before_step_0(ran, 3)
    for field, others, own in (("numpy", numpy.__version__, "0.0.1"), ("variables.NCCL_ALGO", "None", "Ring")):
        name = f"environment.{field}"
        assert ran.lines(name) == [[name, others, "1-2", *HOST], [name, own, "0", *HOST]]
    assert f"against the majority: rank 0 on {' '.join(HOST)}" in ran.message
    assert not ran.out.exists()


@pytest.mark.long
def test_what_one_rank_alone_is_refused_stops_all_with_its_words(run: Run):
    ran = run("arguments", 1, 3, ARGUMENTS="--set data.prepared=nowhere")
    assert ran.codes == dict.fromkeys(range(3), "2"), ran.message
    message = "nowhere/manifest.json: missing. Prepare the data first: make repro (met by rank 1 of 3)"
    assert ran.message.count(message) == 1
    assert "]: Traceback" not in ran.message and ran.steps() == 0 and not ran.out.exists()


def test_rank_with_other_code_lock_config_and_data_stops_all(run: Run, config: Config, tmp_path: Path):
    other = copied(tmp_path / "other", ("src", "vendor", "requirements"), ("params.yaml", "pyproject.toml"))
    with (other / "src" / PACKAGE / "model.py").open("a") as source:
        source.write("# another comment\n")
    for name in ("train-cpu.txt", "train-cuda.txt"):  # run.txt still has the version that is loaded
        lock = other / "requirements" / name
        lock.write_text(re.sub(r"(?m)^fsspec==\S+", "fsspec==1.0", lock.read_text()))
    folder = str(tmp_path / "data")
    data = {"raw": str(PROJECT / config.data.raw), "prepared": folder, "test_percent": 30}
    prepare_here(config.data.model_copy(update=data))
    manifest.write(Path(folder), requested=config.data)  # or the rank is refused before it can be compared
    arguments = f"--set data.prepared={folder} --set train.clip_norm=2"
    ran = run("code+arguments", 1, 2, OTHER=str(other), ARGUMENTS=arguments)
    assert_stopped_before_step_0(ran, 2)
    assert [line[2] for line in ran.lines("code.model.py")] == ["0", "1"]
    assert [line[2] for line in ran.lines("lock.fsspec")] == ["0", "1"]
    assert [line[1:3] for line in ran.lines("config.train.clip_norm")] == [["1.0", "0"], ["2.0", "1"]]
    assert len(ran.lines("data.files")) == 2
    assert "so no rank is blamed" in ran.message


def test_rank_with_other_initial_weights_is_named(run: Run):
    ran = run("initial_weights", 2, 3)
    assert_stopped_before_step_0(ran, 3)
    assert [[line[0], *line[2:]] for line in ran.lines("head.weight")] == [
        ["head.weight", "0-1", *HOST],
        ["head.weight", "2", *HOST],
    ]
    assert len(ran.lines("head.bias") + ran.lines("features.0.weight")) == 0  # only what differs
    assert "step 0: the ranks' weights differ" in ran.message
    assert f"against the majority: rank 2 on {' '.join(HOST)}" in ran.message


def test_ranks_in_other_folders_agree(run: Run, tmp_path: Path):
    other = copied(
        tmp_path / "elsewhere", ("src", "vendor", "requirements"), ("params.yaml", "pyproject.toml")
    )  # the same code, but not the same path
    ran = run("code", 1, 2, OTHER=str(other))
    assert (ran.code, ran.codes) == (0, {0: "0", 1: "0"}), ran.message
    assert (ran.out / "model.safetensors").is_file()
