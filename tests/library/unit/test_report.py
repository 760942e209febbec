"""`samebits report`: one page tells what runs are, and whether their bits are equal."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade import ENVIRONMENT, traced, write
from pages import message, page
from support import PROJECT

pytestmark = pytest.mark.usefixtures("in_a_folder")


# ---- what it says of bits


def test_equal_runs_are_called_equal():
    one, other = write(Path("one")), write(Path("other"), ranks=3)
    found = page(one, other)
    assert "2 runs: EQUAL" in found.text and "one and other have equal bits in all 12 steps, trace root " in found.text
    assert "Where the runs part" not in found.text and found.row("world size") == ["1", "3"]
    assert "One line: one, other." in found.picture("loss")


@pytest.mark.parametrize("phase", ["batch", "loss", "gradient"])
def test_planted_difference_is_named_and_its_growth_is_drawn(phase: str):
    one = write(Path("one"))
    other = write(
        Path("other"),
        rows=traced(12, part=7, phase=phase),
        curves={"loss": lambda step: 2.5 * 0.9**step + max(0, step - 6) * 1e-6},
        weights="1" * 64,
    )
    found = page(one, other)
    assert "2 runs: DIFFERENT" in found.text
    assert f"one and other first differ at step 7, {phase}. " in found.text
    assert "numeric environment are the same, so this breaks the contract" in found.text
    assert ["other", "one", f"step 7, {phase}", "5e-06", "5e-06"] in found.rows
    assert "10⁻⁶" in found.picture("Distance of the losses, |difference|")


def test_difference_on_another_machine_is_no_breach():
    one = write(Path("one"))
    other = write(Path("other"), rows=traced(12, part=0), environment=ENVIRONMENT | {"cpu": {"model": "two"}})
    found = page(one, other)
    assert "They ran in different numeric environments (cpu.model), so their bits may differ." in found.text
    assert found.row("cpu.model") == ["one", "two"]


def test_runs_of_other_addresses_are_not_compared():
    found = page(write(Path("one")), write(Path("other"), seed=1, config={"model.width": 64}))
    assert "They have 2 content addresses; bits of different addresses are not comparable." in found.text
    assert "EQUAL" not in found.text and "DIFFERENT" not in found.text
    assert ["seed", "0", "1", "yes"] in found.rows and ["seed", "0", "1"] in found.rows
    assert ["model.width", "32", "64", "yes"] in found.rows


def test_unfinished_run_is_equal_so_far():
    one = write(Path("one"))
    cut = write(Path("cut"), steps=5, status="RUNNING")
    with (cut / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 5, "metr')
    noted = cut / "trace" / "rank0000.jsonl"
    lines = noted.read_text().splitlines(keepends=True)
    noted.write_text(lines[0] + '{"step": 1, "ra' + "".join(lines[1:]))  # a crash, and the run went on
    found = page(one, cut)
    assert "2 runs: EQUAL SO FAR" in found.text and "equal bits for 5 steps: one has 12, cut has 5" in found.text
    assert found.row("status") == ["FINISHED", "RUNNING: 5 steps so far"]
    assert "Lines of the trace that cannot be read: 1." in found.picture("cut")
    assert "Where the runs part" not in found.text and found.row("receipt")[1] == "none"


def test_one_run_is_told_without_a_verdict():
    found = page(write(Path("one"), metrics={"accuracy": 0.975, "f1": math.nan}))
    assert "There is no second run to compare its bits with." in found.text
    assert found.row("metric accuracy") == ["0.975"] and found.row("metric f1") == ["nan"]
    for title in ("What was asked", "On what", "What happened", "Loss and metrics", "Time by rank", "Peak memory"):
        assert title in found.text
    assert "Differences of" not in found.text and "<details>" in found.source


def test_proof_of_a_run_is_shown_and_that_one_contradicts_itself():
    segment = {"first": 0, "stop": 3, "ranks": 2, "workers": 0, "shard": "none"}
    proved = write(Path("one"), proof={"segments": [segment], "changed": ["TZ"], "not_tried": {}})
    refused = write(Path("two"), status="FAILED")
    (refused / "contradiction.json").write_text("{}")
    equal = "EQUAL: steps 0 to 2, trained again on 2 ranks, 1 circumstance changed"
    assert page(proved, refused).row("proof") == [equal, "DIFFERS: the run contradicts itself"]


def test_headline_counts_where_one_of_several_runs_differs():
    runs = [write(Path(name)) for name in ("one", "two")] + [write(Path("odd"), rows=traced(12, part=3))]
    found = page(*runs)
    assert "3 runs: 2 EQUAL, 1 DIFFERENT" in found.text
    assert "one and two have equal bits in all 12 steps" in found.text
    other = write(Path("other"), seed=1)
    assert "3 runs: EQUAL" in page(*runs[:2], other).text
    assert "4 runs: 2 EQUAL, 1 DIFFERENT" in page(*runs, other).text


def test_receipts_alone_are_enough_for_the_verdict():
    one, other = write(Path("one")), write(Path("other"), rows=traced(12, part=3), weights="1" * 64)
    found = page(one / "receipt.json", other / "receipt.json")
    assert "have different trace roots: " in found.text and "No numbers over steps are recorded." in found.text
    assert found.row("metric accuracy") == ["0.975"]
    assert "Time by rank" not in found.text and "Peak memory" not in found.text


def test_altered_record_is_told_and_no_verdict_rests_on_it():
    one, other, third = (write(Path(name)) for name in ("one", "other", "third"))
    (other / "metrics.json").write_text('{"accuracy": 1.0, "steps": 12}')
    receipt = third / "receipt.json"
    receipt.write_bytes(receipt.read_bytes().replace(b"0.004", b"0.005"))
    found = page(one, other, third)
    assert "3 runs: UNKNOWN" in found.text and "EQUAL" not in found.text
    assert "other: metrics.json: not as the receipt states: altered, or of another run." in found.text
    assert "third: receipt.json: altered: address is not the hash of its preimage" in found.text
    assert found.text.count("cannot be compared: a record is not as its receipt states.") == 2


# ---- what is refused


REFUSED: dict[str, tuple[Callable[[], list[str]], str]] = {
    "nothing": (lambda: ["nowhere"], "nowhere: no such run directory, receipt or MLflow run id"),
    "empty": (lambda: [""], "'': no such run directory"),
    "no run": (lambda: [str(PROJECT / "src")], "src: no record of a run seen"),
    "twice": (lambda: ["one", "./one"], "one and ./one: the same run given twice; give each run once"),
    "no page": (lambda: ["one", "--out", "one/receipt.json"], "a name that ends with .html wanted"),
    "a folder": (lambda: ["one", "--out", "one/x.html"], "x.html"),
    "no row": (lambda: ["bad"], "metrics.jsonl, line 2: no row of metrics."),
    "no step": (lambda: ["far"], "metrics.jsonl, line 1: no row of metrics."),
    "no number": (lambda: ["huge"], "metrics.json: steps: 1000"),
    "no table": (lambda: ["table"], "steps.csv: no table of metrics"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_told_in_a_line(name: str):
    (write(Path("one")) / "x.html").mkdir()
    bad, table = write(Path("bad")), write(Path("table"))
    (bad / "metrics.jsonl").write_text('{"step": 0, "metrics": {}}\n{"step": 1, "metrics": {"a": "b"}}\n')
    (table / "metrics.jsonl").unlink()
    (table / "steps.csv").write_text("step,loss\n0,1.5\n1,many\n")
    (write(Path("far")) / "metrics.jsonl").write_text(json.dumps({"step": 10**300, "metrics": {"a": 1}}) + "\n")
    (write(Path("huge")) / "metrics.json").write_text(json.dumps({"steps": 10**400}))
    words, wanted = REFUSED[name]
    said = message(*words(), code=2)
    assert wanted in said and said.count("\n") == 1


def test_table_of_steps_stands_in_where_mlflow_has_no_rows():
    run = write(Path("one"))
    (run / "metrics.jsonl").rename("rows")
    (run / "run.json").unlink()
    (run / "steps.csv").write_text("step,loss\n0,1.5\n1,\n2,0.5\n")
    found = page(run)
    assert "one: from 1.5 to 0.5" in found.alts[0] and found.row("status") == ["FINISHED"]
