"""The page of `samebits report`: its pictures, what others measured, its bytes, and what no record can make it do."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from handmade import ENVIRONMENT, HOSTILE, IMAGE, PHASES, hostile, write
from pages import ELEMENTS, given, message, page
from support import PROJECT, SECRETS, WORD, python

from samebits.analysis.report import plots, public
from samebits.base.shape import plain
from samebits.record.view import Curve, Rank, RunView
from samebits.tracking import tracking

pytestmark = pytest.mark.usefixtures("in_a_folder")
FLOOR = {"values": [0.96, 0.98], "mean": 0.97, "deviation": 0.01, "low": 0.95, "high": 0.99}
NOISE = {
    "groups": {
        "strict": {"metrics": {"accuracy": FLOOR | {"deviation": 0}}},
        "relaxed": {"metrics": {"accuracy": FLOOR, "f1": FLOOR | {"deviation": None}}},
        "seeds": {"metrics": {"accuracy": FLOOR | {"deviation": 0.03}}},
    },
    "verdicts": ["accuracy: less than the floor", {"sentence": "f1: undecided"}],
}
SPENT = {"strict": 0.042, "relaxed": 0.035, "cost_pct": 19.9, "low": 17.1, "high": 22.9, "differs_from_zero": True}
COST = {
    "device": "a CPU",
    "rows": [
        {"flag": "MKL_CBWR", "seconds": SPENT, "memory": SPENT | {"strict": 2**28, "relaxed": 2**27}},
        {"flag": "nnpack", "seconds": SPENT | {"cost_pct": -0.2, "low": -1.0, "differs_from_zero": False}},
        {"flag": "lost", "seconds": SPENT | {"cost_pct": None, "low": "nan", "high": "inf"}, "memory": None},
    ],
    "determinism_cost_pct": 21.3,
}
ROW = {"area": "code", "name": "git", "state": "ok", "seen": "nothing uncommitted", "fix": ""}
DOCTOR = [ROW, ROW | {"name": IMAGE, "state": "FAULT", "seen": "see /users/somebody/x.py", "fix": "mend\nit"}]


# ---- what others measured


def test_noise_floor_is_a_band_in_the_picture_of_its_metric():
    run = write(Path("one"), curves={name: lambda step: 0.9 + step / 200 for name in ("accuracy", "f1", "loss")})
    plain_page, found = page(run), page(run, *given("noise", NOISE))
    assert "relaxed (dashed) 0.96 to 0.98, seeds (dotted) 0.94 to 1." in found.picture("accuracy")
    bands = [found.picture(name).count('opacity: 0.1"') for name in ("accuracy", "f1", "loss")]
    assert bands == [2, 0, 0], "mean ± deviation of two groups, and none where the deviation is not known"
    assert 'opacity: 0.1"' not in plain_page.source and "Noise floor" not in plain_page.text
    assert ["f1", "relaxed", "0.97", "unknown", "2"] in found.rows
    assert "accuracy: less than the floor" in found.text and "f1: undecided" in found.text


def test_cost_is_bars_and_those_not_told_from_zero_are_hollow():
    found = page(write(Path("one")), *given("cost", COST))
    bars = found.picture("Cost in seconds")
    assert [bars.count(f"fill: {fill}; stroke: #0072b2") for fill in ("#0072b2", "none")] == [1, 1]
    assert "MKL_CBWR" in bars and "nnpack" in bars and ">lost<" not in bars
    assert ["MKL_CBWR", "42 ms", "35 ms", "+19.9 %", "+17.1 %", "+22.9 %", "yes"] in found.rows
    assert ["lost", "42 ms", "35 ms", "unknown", "unknown", "unknown", "yes"] in found.rows
    assert ["MKL_CBWR", "256 MiB", "128 MiB", "+19.9 %", "+17.1 %", "+22.9 %", "yes"] in found.rows
    assert "On a CPU, all flags together cost +21.3 %." in found.text


def test_checklist_is_a_table():
    found = page(write(Path("one")), *given("doctor", DOCTOR))
    assert "1 of 2 checks found a fault." in found.text
    assert found.row(f"code: {IMAGE}") == ["✗ FAULT", "see …/x.py", "mend it"]


@pytest.mark.parametrize("name", ["noise", "cost", "doctor"])
def test_what_no_verb_printed_is_refused_in_a_line(name: str):
    run, word = write(Path("one")), {"noise": "groups", "cost": "device", "doctor": "[0]"}[name]
    for value in ({"groups": {"relaxed": 1}}, [{"area": 1}]):
        said = message(run, *given(name, value), code=2)
        assert said.count("\n") == 1 and f"`samebits {name} --json` prints it" in said, said
    assert word in message(run, *given(name, [{}] if name == "doctor" else {}), code=2)
    assert "nowhere.json: missing" in message(run, f"--{name}", "nowhere.json", code=2)


# ---- pictures


def test_what_no_line_can_show_is_told_in_words():
    odd: dict[int, float] = {3: math.nan, 4: math.inf, 5: 1e301}
    found = page(
        write(Path("one"), curves={"loss": lambda step: odd.get(step, 1.0 + step), "none": lambda _: math.nan})
    )
    shown = found.picture("loss")
    assert "one: 1 of 12 values is NaN, first at step 3; 1 of 12 values is infinite, first at step 4; " in shown
    assert "1 of 12 values is too large to draw, first at step 5: gaps in its line." in shown
    (line,) = re.findall('<path d="([^"]*)"[^>]*stroke: #0072b2; stroke-width: 2', shown)
    assert line.count("M") == 2, "one gap"
    assert "12 of 12 values are NaN" in found.picture("none") and "nan" not in found.picture("none").replace("NaN", "")


def test_runs_of_other_lengths_have_one_axis_and_are_not_said_to_part():
    found = page(write(Path("long"), steps=40), write(Path("short"), steps=10, config={"model.width": 8}))
    assert "Where the runs part" not in found.text and found.row("steps") == ["40", "10"]
    assert found.picture("loss").count("stroke: #d55e00; stroke-width: 1.2") == 1


def test_long_line_keeps_its_extremes():
    values = np.sin(np.arange(1_000_000) / 5e4)
    values[[123_456, 777_777]] = 7, -7
    values[500_000:510_000] = np.nan
    thin = plots.thinned(Curve(np.arange(1_000_000.0), values))
    assert len(thin.steps) == plots.STRETCHES and (np.diff(thin.steps) > 0).all()
    assert np.nanmax(thin.high) == 7 and np.nanmin(thin.low) == -7 and np.isnan(thin.mean).sum() == 2
    first = values[: int(thin.steps[1])]
    assert (thin.mean[0], thin.low[0], thin.high[0]) == (pytest.approx(first.mean()), first.min(), first.max())
    for count in (0, 1, plots.STRETCHES):
        short = Curve(np.arange(float(count)), np.arange(float(count)))
        assert plots.thinned(short).mean.tolist() == plots.thinned(short).high.tolist() == short.values.tolist()


def test_long_run_makes_a_small_page():
    """Of its steps the page keeps a few hundred, with a shade from the smallest to the largest value."""
    short, long = (page(write(Path(name), steps=steps)) for name, steps in (("short", 300), ("long", 30_000)))
    assert len(long.source) < 2 * len(short.source)
    shades = [found.picture("loss").count("opacity: 0.18") for found in (short, long)]
    assert shades[0] == 0 and shades[1] > 0 and ">30k<" in long.picture("loss")


def test_map_of_times_has_the_mean_of_each_stretch():
    steps, times = np.arange(1000), np.arange(1000) / 1000
    rank = Rank(0, "", steps[100:], {"load": times[100:]}, 0, 0)
    seen = plots.binned(rank, "load", 1000)
    assert len(seen) == plots.BINS and np.isnan(seen[:20]).all() and seen[20] == pytest.approx(0.102)
    assert np.isnan(plots.binned(rank, "other", 1000)).all()
    assert plots.ceiling(np.array([1.0, 1.0, 50.0])) == 4 and plots.ceiling(np.array([1.0])) == 2


def test_step_that_was_made_again_counts_as_made_last():
    run = write(Path("one"), steps=3)
    again = {"step": 1, "rank": 0, "host": "b", "seconds": dict.fromkeys(PHASES, 5.0), "memory": 7}
    with (run / "trace" / "rank0000.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    (rank,) = RunView(run).ranks
    assert rank.steps.tolist() == [0, 1, 2] and rank.seconds["load"].tolist() == [0.001, 5.0, 0.001]


ABSURD = [
    *({"step": step} for step in (10**18, -1, 1.5, None)),
    *({"seconds": seconds} for seconds in ([1], {"load": "x"})),
    *({"memory": 10**400}, {"rank": "x"}),
]


def test_absurd_times_are_left_out_and_counted():
    run = write(Path("one"), steps=3)
    row = {"step": 1, "rank": 0, "host": "b", "seconds": {"load": 1e308, "update": math.nan}, "memory": 7}
    with (run / "trace" / "rank0000.jsonl").open("a") as file:
        file.writelines(json.dumps(row | absurd) + "\n" for absurd in ({}, *ABSURD))
    assert f"Lines of the trace that cannot be read: {len(ABSURD)}." in page(run).picture("one")


@pytest.mark.parametrize("steps", [0, 1])
def test_run_of_hardly_any_step_has_its_page(steps: int):
    found = page(write(Path("one"), steps=steps, status="RUNNING"), write(Path("other"), steps=steps, status="FAILED"))
    assert found.row("status") == [f"RUNNING: {steps} steps so far", f"FAILED: {steps} steps so far"]
    assert ("EQUAL" in found.text) is bool(steps) and ("UNKNOWN" in found.text) is not bool(steps)


def test_every_picture_is_told_in_words_too():
    found = page(write(Path("one"), ranks=2), write(Path("other"), seed=1), *given("cost", COST))
    assert found.source.count("<img ") == found.source.count("<figure>") == len(found.alts) > 0
    assert "loss over steps. one: from 2.5 to 0.7845" in found.alts[0]
    assert any("rank 1: load 2 ms, compute 3 ms, update 4 ms" in alt for alt in found.alts)
    assert len(set(found.alts)) == len(found.alts)


# ---- its bytes


@pytest.mark.long
def test_same_runs_give_the_same_bytes_in_any_process():
    runs = write(Path("one"), ranks=2), write(Path("other"), seed=1), hostile(Path("h"))
    words = [*map(str, runs), *given("noise", NOISE), *given("cost", COST), *given("doctor", DOCTOR)]
    first = page(*words).source
    assert page(*words).source == first
    for folder in (home := Path("home").resolve(), programs := Path("programs")):
        folder.mkdir()
    (programs / "fc-list").write_text("#!/bin/sh\ntouch home/asked\n")  # which lists the fonts of this machine
    (programs / "fc-list").chmod(0o755)
    words += ["--out", ""]
    path = os.pathsep.join([str(programs.resolve()), os.environ["PATH"]])
    for seed in ("1", "2"):
        words[-1:] = [f"{seed}.html"]
        env = {"PYTHONHASHSEED": seed, "HOME": str(home), "TMPDIR": str(home), "PATH": path}
        done = python("-m", "samebits", "report", *words, cwd=Path.cwd(), env=env)
        assert (done.returncode, done.stderr) == (0, "") and Path(words[-1]).read_text("utf-8") == first
    assert not [*home.iterdir()], "matplotlib looks for no fonts, and leaves no list of them"
    assert page(*reversed(runs)).source != page(*runs).source


# ---- what no record can do


def test_hostile_records_are_text_and_nothing_else():
    found = page(hostile(Path("h")), *given("doctor", DOCTOR))
    assert found.elements <= ELEMENTS, found.elements - ELEMENTS
    assert not [name for name in found.attributes if name.startswith("on")]
    assert not re.search(r"<script|<svg onload|<img (?!src=\"data:)", found.source)
    outside = {link for link in found.links if not link.startswith(("#", "url(#"))}
    assert {link for link in outside if not link.startswith("data:")} == {f"h/{quote(IMAGE)}/"}
    assert all(link.startswith("data:image/png;base64,") for link in outside if link.startswith("data:"))
    assert not re.search(r"url\((?!#)|@import|expression", "".join(found.styles))
    for word in HOSTILE:
        assert plain(word) in found.text, word
    assert found.text.count(IMAGE) > 10 and found.row("host") == [HOSTILE[1]]
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in found.source
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", found.source)


@pytest.mark.parametrize("name", [r"$\alpha$", r"a$b", r"\$x$", "$" * 9, r"\frac{"])
def test_dollars_are_no_mathematics(name: str):
    cost = COST | {"rows": [{"flag": name, "seconds": SPENT}]}
    assert f">{name}</text>" in page(write(Path("one")), *given("cost", cost)).picture("Cost in seconds")


def test_credentials_and_places_of_the_machine_stay_away(tmp_path: Path):
    token = "ghp_" + "a" * 36
    requested = {
        "tracking.uri": SECRETS["TORCH_URL"], "api_token": WORD, "data.raw": f"{tmp_path}/deep/digits.csv",
        "note": f"it is {token}", "store": "sqlite:////users/somebody/runs.db",
        "home": "~/keys/x", "share": "train/val",
    }  # fmt: skip
    run = write(tmp_path / "one", config=requested, environment=ENVIRONMENT | {"variables": {"NCCL_TOKEN": WORD}})
    found = page(run)
    for secret in (WORD, token, "somebody", str(tmp_path), "/deep/"):
        assert secret not in found.source, secret
    assert "one" in found.text and found.row("share") == ["train/val"] and found.row("data.raw") == ["…/digits.csv"]
    assert found.row("api_token") == ["(hidden)"] and found.row("store") == ["sqlite:…/runs.db"]


def test_names_are_as_given_and_each_is_there_once(tmp_path: Path):
    assert public.names(["a/x", "a/y"]) == ["a/x", "a/y"]
    assert public.names([f"{tmp_path}/a", "/elsewhere/run", "/nowhere/run"]) == ["a", "…/run", "…/run (2)"]


def test_name_of_a_run_leads_to_its_files_where_both_lie_in_the_project(monkeypatch: pytest.MonkeyPatch):
    """The link is relative, so it holds where the project is moved, and names no place of the machine."""
    write(Path("runs/a b"))
    write(Path("elsewhere"), seed=1)
    monkeypatch.chdir(Path("runs"))
    found = page("a b", "../elsewhere")
    assert {link for link in found.links if not link.startswith(("#", "url(#", "data:"))} == {"a%20b/"}


# ---- MLflow


@pytest.mark.long  # a new store takes seconds
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_page_is_added_to_the_runs_in_mlflow(monkeypatch: pytest.MonkeyPatch):
    for name, value in tracking.QUIET.items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"sqlite:///{Path.cwd()}/runs.db")
    client = MlflowClient(uri)
    experiment = client.create_experiment("any", f"file://{Path.cwd()}/artifacts")
    shutil.copyfile(PROJECT / "params.yaml", "params.yaml")  # it names the store for a run that is given by its id
    tracked, alone, by_id = write(Path("tracked")), write(Path("alone"), seed=1), write(Path("by_id"), seed=2)
    first, second = (client.create_run(experiment).info.run_id for _ in range(2))
    (tracked / "tracking.json").write_text(
        json.dumps({"id": "any", "uri": uri, "rows": 12, "complete": True, "run": first})
    )
    for file in ("receipt.json", "metrics.json", "address.json", "environment.json"):
        client.log_artifact(second, str(by_id / file))
    said = message(tracked, alone, second, "--log", "--out", "report.html").splitlines()
    assert said[1:] == [
        f"tracked: added to MLflow run {first}",
        "alone: not in MLflow, the page was not added",
        f"{second}: added to MLflow run {second}",
    ]
    for run in (first, second):
        assert Path(client.download_artifacts(run, "report.html")).read_bytes() == Path("report.html").read_bytes()
    assert second in Path("report.html").read_text("utf-8")
