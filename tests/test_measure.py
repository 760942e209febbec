"""`make measure` and `make bench-check`: ratios with intervals, and a slow-down that is seen."""

import json
import math
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import harness
import hashing
import loader
import order
import pytest
import sharding
import step_cost
from bake import ROOT, STARTERS
from baked import InstalledProject, run
from harness import MARKS, in_turn, table, within, write

MEASURE = ROOT / "measure"
SMALLEST = "convnet"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MEASURE)


def test_each_tool_of_the_makefile_finds_its_modules() -> None:
    """As a program, which has its own folder alone before it."""
    tools = {*re.findall(r"python ((?:tools|measure|benchmarks)/\w+\.py)", (ROOT / "Makefile").read_text())}
    assert len(tools) > 20
    load = "import runpy, sys; sys.path[0] = sys.argv[1]; runpy.run_path(sys.argv[2], run_name='loaded')"
    for tool in tools:
        run("python", "-c", load, Path(tool).parent, tool, cwd=ROOT)


@pytest.fixture
def here(project: InstalledProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools measure the project of the tests."""
    monkeypatch.setattr(harness, "prepared", lambda: nullcontext(project.path))


def planted(factor: float) -> list[float]:
    """Return seconds, `factor` times those of `planted(1)`: both share some noise, and have some of their own."""
    shared = [0.010, 0.012, 0.011, 0.030, 0.010, 0.013, 0.010, 0.011, 0.012]  # the fourth round met other work
    own = [1.00, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.00, 1.01] if factor != 1 else [1.0] * 9
    return [factor * one * other for one, other in zip(shared, own, strict=True)]


def test_proof_that_is_not_equal_counts_as_refused(tmp_path: Path) -> None:
    """A run without one is counted apart from both."""
    import proof

    printed = {"proof       EQUAL: steps 0 to 2, trained again": "EQUAL", "proof  none: prove.when=never": "none"}
    assert {said: proof.verdict(f"weights  0\n{said}\nloss  1\n") for said in printed} == printed
    assert proof.verdict("weights  0\n") == proof.NO_RECEIPT
    (tmp_path / "params.yaml").write_text("verify:\n  shorten: [train.epochs=2, seed=1]  # why\n")
    assert proof.short(tmp_path) == ["train.epochs=2", "seed=1"]


def test_a_ratio_is_of_pairs() -> None:
    """Work that hits both of a round leaves it alone; too few rounds, and what is no time, are refused."""
    from ratios import Ratio, ratio

    found = ratio(planted(1.5), planted(1))
    assert found.low < 1.5 < found.high and found.high - found.low < 0.1
    assert abs(found.middle - 1.5) < 0.01
    assert ratio(planted(1), planted(1)) == Ratio(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="5 rounds seen, 6 or more wanted"):
        ratio([1.0] * 5, [1.0] * 5)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite and above zero"):
            ratio([1.0] * 8 + [wrong], [1.0] * 9)


def test_only_a_slow_down_beyond_noise_counts() -> None:
    """One of 30 % does; none, one of 10 %, and one whose interval reaches down, do not."""
    from ratios import Ratio, has_grown, ratio

    assert has_grown(ratio(planted(1.3), planted(1)), committed=1.0)
    for factor in (1, 1.1):
        assert not has_grown(ratio(planted(factor), planted(1)), committed=1.0)
    assert not has_grown(Ratio(2.0, 1.1, 3.0), committed=1.0)
    assert not has_grown(Ratio(0.5, 0.4, 0.6), committed=1.0)


def test_rows_are_read_as_they_are_written() -> None:
    """With the ratio beside the plain script; that script's own row has none."""
    from ratios import HEAD, read, rows
    from rounds import PINNED, PLAIN, Taken

    times = {PLAIN: 1.0, PINNED: 1.1, "step": 1.5}
    taken = {name: Taken(planted(factor), 3 << 20) for name, factor in times.items()}
    lines = rows(SMALLEST, 1, taken)
    assert read("\n".join(["# Text", HEAD, *lines, "| another | table |"])) == {
        (SMALLEST, 1, PINNED): 1.1,
        (SMALLEST, 1, "step"): 1.5,
    }
    assert all(line.count("|") == HEAD.splitlines()[0].count("|") and line.endswith("| 3 |") for line in lines)


def test_what_each_part_costs_is_told() -> None:
    """The ratios of the parts multiply to that of the step. A part whose ways were not trained has no ratio."""
    from ratios import SHARES, SHARES_HEAD, shares
    from rounds import Taken

    times = {"one-batch": 1.0, "plain": 2.0, "pinned": 3.0, "off": 4.0, "step": 6.0}
    taken = {name: Taken(planted(factor), 0) for name, factor in times.items()}

    def cells_of(*names: str) -> list[str]:
        (line,) = shares(SMALLEST, 1, {name: taken[name] for name in names})
        return line.split("|")[3:-1]

    cells = cells_of(*taken)
    *parts, whole = (float(cell.split()[0]) for cell in cells)
    assert [*parts, whole] == [2.0, 1.5, 1.5, 1.33, 6.0]
    assert math.prod(parts) == pytest.approx(whole, rel=0.01)
    fewer = cells_of("plain", "step", "off")
    assert [name for name, cell in zip(SHARES, fewer, strict=True) if cell.strip()] == ["trace"]
    assert fewer[2] == cells[2]
    assert shares(SMALLEST, 4, {name: taken[name] for name in ("plain", "step")}) == []
    assert {line.count("|") for line in SHARES_HEAD.splitlines()} == {len(cells) + 3}


UNMEASURED = {"architecture.md", "contract.md", "contributing.md", "how-it-works.md"}


@pytest.mark.parametrize("document", sorted({path.name for path in (ROOT / "docs").glob("*.md")} - UNMEASURED))
def test_a_measured_document_names_its_commit(document: str) -> None:
    """Without a change beside it."""
    found = re.findall(r"commit ([0-9a-f]{7,}\S*)", (ROOT / "docs" / document).read_text())
    assert found and all(re.fullmatch("[0-9a-f]{7,40}[.;:]?", commit) for commit in found), found


def test_the_committed_table_is_whole() -> None:
    """It has a ratio of each way, workload and number of processes that `make bench-check` looks at."""
    from document import RESULT
    from ratios import read
    from rounds import CELLS, PLAIN, ways_of

    text = RESULT.read_text()
    wanted = {(*CELLS[cell], name) for cell in CELLS for name in ways_of(cell)}
    assert read(text).keys() == {cell for cell in wanted if cell[2] != PLAIN}
    assert [text.count(mark) for mark in MARKS] == [1, 1]


@pytest.mark.long
def test_a_planted_slow_down_is_seen(
    project: InstalledProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In trainings that run: `make bench-check` fails where each step takes three times as long; equal code passes.

    So much more, that a busy machine does not hide it; how little is seen, the planted numbers above say.
    """
    import check
    import rounds
    from ratios import rows
    from rounds import EPOCHS, PINNED, PLAIN, WAYS, WORKLOADS, Way, measured

    slower = replace(WAYS["step"], slower=2.0)
    ways = {PLAIN: WAYS[PLAIN], "step": WAYS["step"], "slower": slower}
    quick = replace(WORKLOADS[SMALLEST], settings=(EPOCHS, "model.width=8", "model.depth=1"))
    every = measured(project.path, ways, quick, 1, rounds=18)
    before, taken = (
        {name: replace(one, seconds=one.seconds[half::2]) for name, one in every.items()} for half in range(2)
    )
    document = tmp_path / "peers.md"
    committed = {PLAIN: before[PLAIN], PINNED: before[PLAIN], "step": before["step"]}
    document.write_text("\n".join(rows(SMALLEST, 1, committed)))

    def already(project: Path, requested: dict[str, Way], *how: object) -> dict[str, object]:
        """Return what was measured of the same ways, in the other half of the rounds."""
        assert requested.keys() == {PLAIN, "step"} and requested["step"] in (WAYS["step"], slower)
        return {PLAIN: taken[PLAIN], "step": taken["slower" if requested["step"] == slower else "step"]}

    def checked(*words: str) -> tuple[int, str]:
        only = ["--only", f"{SMALLEST}-1", "--way", "step", "--document", str(document)]
        monkeypatch.setattr(sys, "argv", ["check.py", *only, *words])
        return check.main(), capsys.readouterr().out

    monkeypatch.setattr(rounds, "prepared", lambda starter: nullcontext(project.path))
    monkeypatch.setattr(rounds, "measured", already)
    for words, code, verdict in ((["--slower", "2.0"], 1, "SLOWER"), ([], 0, "holds")):
        found, printed = checked(*words)
        assert (found, verdict in printed) == (code, True), printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "convnet-3"), "invalid choice: 'convnet-3'"),
        (("--rounds", "5"), "--rounds 5 seen, 6 or more wanted"),
        (("--document", "nowhere.md"), "nowhere.md: no ratio of convnet-1 off seen"),
        (("--way", "plain"), "invalid choice: 'plain'"),
    ],
)
def test_what_cannot_be_checked_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """Before anything is made."""
    done = run(sys.executable, MEASURE / "check.py", *words, cwd=tmp_path, check=False)
    assert done.returncode == 2 and message in done.stdout and "Traceback" not in done.stdout


@pytest.mark.long
def test_steps_on_more_processes_stand_beside_those_of_one(project: InstalledProject) -> None:
    """And the bytes beside those of the formula, which counts the numbers of the project's own model."""
    from rounds import PINNED, WORKLOADS, Taken
    from scaling import PROCESSES, rows, sizes

    held = parameters, buffers = within(project.path, sizes, *WORKLOADS[SMALLEST].settings)
    assert parameters > buffers > 0
    times = {(way, ranks): factor / ranks for way, factor in ((PINNED, 1), ("step", 1.5)) for ranks in PROCESSES}
    cells = list(
        rows(SMALLEST, held, {requested: Taken(planted(took), 0, 4321.0) for requested, took in times.items()})
    )
    assert [cell[4].split()[0] for cell in cells] == ["1", "0.50", "0.25"] * 2
    assert [cell[5].split()[0] for cell in cells] == ["1"] * 3 + ["1.50"] * 3
    assert {cell[6] for cell in cells} == {"4.3"}
    assert [cell[7] for cell in cells[:2]] == ["0.0", f"{4 * parameters / 1000:.1f}"]


@pytest.mark.long
def test_micro_batches_cannot_share_a_pass(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    """One by one their gradients have the same bits each time; at once they have not, or vmap refuses the model."""
    import at_once

    at_once.main()
    message = capsys.readouterr().out
    again = re.findall(r"^(\w+): one by one, and again: (\d+) of (\d+) ", message, re.MULTILINE)
    assert [name for name, equal, of in again if equal == of] == ["transformer", "convnet"], message
    at_once = re.search(r"^transformer: at once: (\d+) of (\d+)$", message, re.MULTILINE)
    assert at_once and int(at_once[1]) < int(at_once[2]), message


# ---- the other tools, as short as can be: they name parts of the library, which may move


@pytest.mark.long
def test_cost_of_a_step_is_measured(project: InstalledProject) -> None:
    """Each variant makes some steps."""
    found = within(project.path, step_cost.measure, "ConvNet", 0.5)
    assert found["parameters"] > 10**4 and all(steps and min(steps) > 0 for steps in found["steps"].values())


@pytest.mark.long
def test_time_of_a_step_is_told_by_functions(
    here: None, project: InstalledProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All functions that are to be timed are there, and the gradients' sum takes some time in the project alone.

    Each workload has a folder of its own, so it begins anew after another.
    """
    import spent

    monkeypatch.setattr(sys, "argv", ["spent.py", "--only", "few", "--steps", "2"])
    spent.main()
    message = capsys.readouterr().out
    rows = re.findall(r"^  (\w.*?) +(\d+) +(\d+) +[-+]\d+$", message, re.MULTILINE)
    for item, in_both in (("forward", True), ("backward", True), ("gradients: added in the tree", False)):
        found = [(int(ours) > 0, int(plain) > 0) for name, ours, plain in rows if name == item]
        assert found == [(True, in_both)], message
    assert (project.path / "build" / "spent-ours-few" / "run.json").is_file()


@pytest.mark.long
def test_kept_memory_is_measured(project: InstalledProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the project sets; a step that keeps its memory meets fewer pages that are new."""
    import allocation

    message = "from samebits.core.flag_table import ALLOCATION; import json; print(json.dumps(ALLOCATION))"
    assert json.loads(project.run(project.python, "-c", message)) == allocation.SETTINGS[allocation.OURS]
    monkeypatch.setitem(allocation.STEPS, network := "transformer", 1)
    plain, ours = (allocation.started(project.path, network, way) for way in (allocation.DEFAULTS, allocation.OURS))
    assert plain["seconds"] > 0 and plain["peak"] > 100 and ours["faults"] < plain["faults"] / 2


@pytest.mark.long
def test_loaders_are_measured(project: InstalledProject) -> None:
    """Both make samples, with each number of workers."""
    found = within(project.path, loader.measure, 1, 0.01, 100)
    pairs = [[*pair["ours"], *pair["plain"]] for pair in found["rates"].values()]
    assert len(pairs) == 6 and all(len(pair) == 2 and min(pair) > 0 for pair in pairs)
    assert all(took > 0 for took in found["parts"].values())


@pytest.mark.parametrize("words", [("plan", 10**5, True), ("torch", 10**5, False)])
def test_orders_are_measured(words: tuple[str, int, bool], project: InstalledProject) -> None:
    """Time of batches in the middle of an epoch."""
    found = within(project.path, order.measure, *words)
    assert found["first"] > 0 and found["each"] > 0 and found["peak"] >= 0


def test_checks_of_data_are_measured(
    project: InstalledProject, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a folder whose hash is known; of another one, the check fails."""
    (tmp_path / "0.bin").write_bytes(b"0")
    known = project.run(project.python, "-m", "samebits", "hash-data", "--set", f"data.raw={tmp_path}").strip()
    for way in hashing.WAYS:
        assert within(project.path, hashing.seconds, way, str(tmp_path), known) > 0
    with pytest.raises(SystemExit, match="seconds"):
        within(project.path, hashing.seconds, "every_byte", str(tmp_path), "0" * 64)
    assert "0" * 64 in capfd.readouterr().err


@pytest.mark.long
def test_sharded_models_are_measured(project: InstalledProject) -> None:
    """A rank of two sends at least what the formula says."""
    found = within(project.path, sharding.measure, "full", 64, 2, 3, 2, ranks=2)
    assert found["sent"] >= 12 and found["seconds"] > 0 and found["held"] >= 0


def test_each_round_begins_with_another_way() -> None:
    """And each way has a turn in each, whose outcome stands in the round's place."""
    turns: list[str] = []
    found = in_turn("abc", lambda way: turns.append(way) or len(turns), range(4))
    assert "".join(turns) == "abcbcacababc" and found == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


def test_a_table_finds_its_place_in_a_document(tmp_path: Path) -> None:
    """What stands around the place stays; a document without one is left alone."""
    document = tmp_path / "some.md"
    document.write_text("\n".join(["before", *MARKS, "after", ""]))
    for made in (("old",), ("2 cores", table("a | b", [[1, 2]]))):
        write(document, *made)
    assert document.read_text() == "\n".join(
        ["before", MARKS[0], "2 cores", "", "| a | b |", "|---|---|", "| 1 | 2 |", MARKS[1], "after", ""]
    )
    document.write_text("no place")
    with pytest.raises(SystemExit, match="between which the table is to stand"):
        write(document, "new")
    assert document.read_text() == "no place"


@pytest.mark.parametrize(("recipe", "code"), [('test $(INSTALLER) = uv && test -z "$$PYTHONPATH"', 0), ("false", 1)])
def test_first_make_repro_of_each_starter_is_timed(
    recipe: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import times

    def bake(out: Path, starter: str) -> Path:
        (out / "Makefile").write_text(f"repro:\n\t@{recipe}\n")
        return out

    timed = {wait.starter for wait in times.WAITS if wait.starter}
    assert timed == {path.name for path in STARTERS.iterdir()} - {"pins"} and len(timed) > 6
    monkeypatch.setattr(times, "bake", bake)
    (tmp_path / "new").mkdir()
    if code:
        with pytest.raises(SystemExit, match=r"^make repro of series ended with 2:"):
            times.from_nothing("series", tmp_path / "new")
    else:
        assert times.from_nothing("series", tmp_path / "new") > 0 and not (tmp_path / "new").exists()


@pytest.mark.long
def test_checkpoint_is_timed_beside_steps(project: InstalledProject) -> None:
    import times

    waits = within(project.path, times.checkpoint, 8)
    assert len(waits) == 3 and all(len(each) == 5 and min(each) > 0 for each in waits)
