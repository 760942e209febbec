"""A generated project does what its README says: it reproduces, and its own tests and linters pass."""

import csv
import faulthandler
import io
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from bake import ROOT, TOOLS, VENV, in_venv, python_path
from baked import Bake, BakedProject, Environment, InstalledProject, run

# Croissant's own reader: what it complains of in a file, and that it has read it.
CROISSANT = """
import sys, mlcroissant
issues = mlcroissant.Dataset(jsonld=sys.argv[1]).metadata.issues
print(*issues.errors, *issues.warnings, "read", sep="\\n")
"""
# Answers that could leak into a hash: names shorter and longer than DVC's line, other servers, no CI.
ANSWERS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(Path(__file__).parent.glob("answers/*.yaml"))}


@pytest.fixture(params=ANSWERS.values(), ids=ANSWERS)
def baked(request: pytest.FixtureRequest, bake: Bake, project: InstalledProject) -> BakedProject:
    """A project that was only generated; the environment of `project` has the tools."""
    return bake(**request.param)


def test_pipeline_is_up_to_date_right_after_generation(baked: BakedProject) -> None:
    """The shipped dvc.lock is one of this very code, whatever the answers."""
    printed = run("dvc", "repro", "--dry", "--allow-missing", cwd=baked.path, env=in_venv(baked.path, baked.env)).stdout
    assert "Data and pipelines are up to date." in printed
    assert len(re.findall(r"Stage '\w+' didn't change, skipping", printed)) == 3


def test_dvc_reads_the_remote_as_it_was_answered(bake: Bake, project: InstalledProject) -> None:
    baked = bake(**ANSWERS["everything-else"])
    printed = run("dvc", "config", "remote.storage.url", cwd=baked.path, env=in_venv(baked.path, baked.env)).stdout
    assert printed == f"{ANSWERS['everything-else']['dvc_remote']}\n"


def test_shipped_lock_is_written_as_dvc_writes_it(baked: BakedProject) -> None:
    """So that reproducing leaves no difference behind, however long the package's name is."""
    dump = "from dvc.utils.serialize import *; print(end=dumps_yaml(parse_yaml(open(0).read(), '')))"
    again = run(VENV / "bin" / "python", "-c", dump, input=baked.text("dvc.lock"), env=baked.env)
    assert again.stdout == baked.text("dvc.lock")


def test_names_and_servers_change_no_hash(baked: BakedProject, project: InstalledProject) -> None:
    """The content address is the released one, and so is the expected result."""
    prepared = f"--set=data.prepared={project.path / 'data' / 'prepared'}"
    env = in_venv(baked.path, baked.env)
    printed = run("python", "-m", "samebits", "address", prepared, cwd=baked.path, env=env)
    (released,) = yaml.safe_load(baked.text("results.lock"))["results"]
    assert yaml.safe_load(printed.stdout)["address"] == released["address"]
    for shown in ("README.md", "vendor/samebits/docs/resume.md"):
        assert released["weights"] in baked.text(shown)


@pytest.fixture(scope="module")
def reproduced(env: Environment, tmp_path_factory: pytest.TempPathFactory) -> BakedProject:
    """All the way, under other names, as `make demo` goes it: what that printed is in `log`."""
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    answers = ANSWERS["everything-else"]
    out = tmp_path_factory.mktemp("demo")
    # a run waits a minute for a server that is nowhere
    env = {**env, "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    (line,) = [line for line in run("make", "--dry-run", "demo", cwd=ROOT).stdout.splitlines() if "demo.py" in line]
    words = shlex.join([str(out), *(f"{name}={value}" for name, value in answers.items())])
    printed = run("sh", "-c", f"{line} {words}", cwd=ROOT, env=env).stdout
    project = out / answers["project"]
    # another project may have been installed there since
    return BakedProject(project, printed, in_venv(project, env))


@pytest.mark.long
def test_demo_reproduces_the_released_digest_twice_and_leaves_nothing_changed(reproduced: BakedProject) -> None:
    (released,) = yaml.safe_load(reproduced.text("results.lock"))["results"]
    verdict = f"reproduced bit for bit: the digest this template was released with (weights {released['weights']})"
    assert verdict in reproduced.log
    assert "the outputs are those of the committed dvc.lock" in reproduced.log
    assert reproduced.log.endswith(f" {released['weights']}\nEQUAL\nand what this template was released with\n")
    assert reproduced.run("git", "status", "--porcelain") == ""
    assert released["metrics"]["accuracy"] >= 0.97


@pytest.mark.long
def test_dvc_draws_the_steps_and_the_classes(reproduced: BakedProject) -> None:
    """Without a word of configuration, and without leaving a file that git sees."""
    drawn = json.loads(reproduced.run("dvc", "plots", "show", "--json"))["data"]
    points = {title: plots[0]["content"]["data"]["values"] for title, plots in drawn.items()}
    steps = json.loads(reproduced.text("artifacts/metrics.json"))["steps"]
    curves = {"Loss of each step": "loss", "Length of the gradient": "gradient_norm", "Learning rate": "learning_rate"}
    assert points.keys() == {*curves, "Classes of the test set"}
    for title, column in curves.items():
        assert [int(point["step"]) for point in points[title]] == list(range(steps))
        assert all(float(point[column]) > 0 for point in points[title])
    confusion = json.loads(reproduced.text("artifacts/evaluation.json"))["confusion"]
    counted = Counter((int(point["actual"]), int(point["predicted"])) for point in points["Classes of the test set"])
    assert counted == {(a, p): n for a, row in enumerate(confusion) for p, n in enumerate(row) if n}
    reproduced.run("dvc", "plots", "show")
    assert reproduced.run("git", "status", "--porcelain") == ""


@pytest.mark.long
def test_bundle_describes_the_data_as_croissant_wants_it(reproduced: BakedProject, tmp_path: Path) -> None:
    """The reader of MLCommons is the judge; it must find a description that lacks a digest wrong."""
    reproduced.run("python", "-m", "samebits", "bundle", "artifacts", "--out", "build/bundle.tar")
    with tarfile.open(reproduced.path / "build" / "bundle.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    (described,) = tmp_path.glob("*/runs/1/croissant.json")
    judge = TOOLS / "python", "-c", CROISSANT, described
    lines = run(*judge, stderr=subprocess.DEVNULL).stdout.splitlines()
    assert lines[-1] == "read" and not [line for line in lines[:-1] if "license" not in line], lines
    facts = json.loads(described.read_text())
    del facts["distribution"][0]["sha256"]
    described.write_text(json.dumps(facts))
    refused = run(*judge, check=False)
    assert refused.returncode and re.search("ValidationError: .*sha256", refused.stdout, re.DOTALL), refused.stdout


@pytest.fixture(scope="module")
def experiment(reproduced: BakedProject) -> BakedProject:
    """The same project after an experiment of DVC, a short training."""
    # without the dates of the tests, which DVC cannot read
    own = {name: value for name, value in reproduced.env.items() if not name.startswith("GIT_")}
    experiment = replace(reproduced, env=own)
    experiment.run("dvc", "exp", "run", "--name", "short", "--set-param", "train.epochs=1")
    return experiment


@pytest.mark.long
def test_experiment_of_dvc_is_shown_with_what_it_changed(experiment: BakedProject) -> None:
    def dvc(*words: str) -> str:
        return experiment.run("dvc", *words)

    shown = list(csv.DictReader(io.StringIO(dvc("exp", "show", "--csv"))))
    (short,) = [row for row in shown if row["Experiment"] == "short"]
    assert (short["train.epochs"], short["steps"]) == ("1", "23")
    epochs = json.loads(dvc("params", "diff", "--json"))["params.yaml"]["train.epochs"]
    assert epochs == {"old": 30, "new": 1, "diff": -29}
    metrics = json.loads(dvc("metrics", "diff", "--json"))["artifacts/metrics.json"]
    assert metrics["steps"] == {"old": 675, "new": 23, "diff": -652} and metrics["accuracy"]["diff"] < 0
    (loss,) = [plots for title, plots in json.loads(dvc("plots", "diff", "--json"))["data"].items() if "Loss" in title]
    assert {point["rev"] for point in loss[0]["content"]["data"]["values"]} == {"HEAD", "workspace"}
    checked = run("python", "-m", "samebits", "check", cwd=experiment.path, env=experiment.env, check=False)
    assert checked.stdout.startswith("content address ") and "has no expected result" in checked.stdout


@pytest.mark.long
def test_other_arithmetic_is_told_and_compared_by_its_metrics(experiment: BakedProject) -> None:
    """On a CPU of another class: its own bits, metrics within the tolerance, and a plain sentence."""
    env = {**experiment.env, "OMP_NUM_THREADS": "1"}  # native: allowed, and quicker beside other tests

    def samebits(*words: str, check: bool = True) -> str:
        return run("python", "-m", "samebits", *words, cwd=experiment.path, env=env, check=check).stdout

    native = "--set", "determinism.cpu=native"
    samebits("accept", "artifacts", "--source", "an experiment")
    samebits("train", *native, "--set", "tracking.enabled=false")
    samebits("evaluate", *native)
    assert "(determinism.cpu: native then, portable now)" in samebits("check", check=False)
    printed = samebits("check", *native)
    assert printed.startswith("metrics within tolerance: accuracy ")
    assert "Equal bits are not guaranteed here" in printed


@pytest.mark.long
def test_transformer_learns_as_shipped(project: InstalledProject, tmp_path: Path) -> None:
    """The other network, with the settings that the released run had, in a tenth of its epochs."""
    keys = "model.name=transformer", "tracking.enabled=false", "train.epochs=3"
    settings = (word for key in keys for word in ("--set", key))
    project.run(project.python, "-m", "samebits", "train", *settings, "--out", tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["accuracy"] >= 0.8


@pytest.mark.parametrize("damage", [pytest.param("truncated", marks=pytest.mark.long), "altered"])
def test_damaged_data_stops_before_dvc_sees_it(bake: Bake, project: InstalledProject, damage: str) -> None:
    """With its name, the hash wanted and the hash seen; and DVC's pointer stays what it was."""
    baked = bake()
    raw = baked.path / "data" / "raw" / "digits.csv.gz"
    whole = raw.read_bytes()
    raw.write_bytes(whole[:-100] if damage == "truncated" else whole[:100] + b"!" + whole[101:])
    done = run("make", "repro", f"VENV={VENV}", cwd=baked.path, env=baked.env, check=False)
    wanted = yaml.safe_load(baked.text("params.yaml"))["data"]["sha256"]
    assert done.returncode == 2
    assert "data/raw/digits.csv.gz: " in done.stdout and wanted in done.stdout and "Traceback" not in done.stdout
    assert re.search(r"SHA-256 [0-9a-f]{64} \(\d+ bytes\) seen", done.stdout)
    assert baked.run("git", "status", "--porcelain") == ""


@pytest.mark.parametrize("remote", [pytest.param("there", marks=pytest.mark.long), "gone"])
def test_missing_data_are_brought_by_dvc_or_stop_make_before_it_begins(
    bake: Bake, project: InstalledProject, remote: str
) -> None:
    """From a folder of a name with a space; where no remote has them, its name and the way are said once."""
    path = bake().path
    path = path.rename(path.with_name("a project"))
    raw = path / "data" / "raw" / "digits.csv.gz"
    raw.unlink()
    if remote == "gone":
        shutil.rmtree(path / "data" / "remote")
    env = {**in_venv(path, project.env), "PYTHONPATH": python_path(path)}
    command = ("make", "--assume-old=environment", "repro", f"VENV={VENV}")
    if remote == "there":
        command = ("python", "-m", "samebits", "prepare")
    done = run(*command, cwd=path, env=env, check=False)
    assert done.stdout.count("digits.csv.gz: missing; DVC brings it") == 1 and "Traceback" not in done.stdout
    assert (done.returncode == 0) == raw.exists() == (remote == "there"), done.stdout
    assert done.stdout.count("DVC cannot bring it: its remote 'storage' (") == (remote == "gone")


@pytest.mark.long
def test_own_lint_passes(project: InstalledProject) -> None:
    project.lint()
