"""Starters: each is generated whole, with nothing of another, and keeps the contract."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import golden
import networks
import pytest
import yaml
from bake import ROOT, STARTERS, VENV, in_venv
from baked import Bake, BakedProject, InstalledProject, commit_all, copy_venv, left_of_the_starter, run

KILLED = "killed and resumed on 2 ranks"
OWN = "tests/test_config.py tests/test_data.py tests/test_locks.py tests/test_model.py"  # and `samebits verify`
KNOWN = json.loads((ROOT / "cookiecutter.json").read_text())["starter"]
QUICK, SMALLEST, PRETRAINED = "series", "blank", "finetuning"
OTHERS = KNOWN[1:]  # the first is what most other tests run on
ADDING = [name for name in KNOWN if (STARTERS / name / "requirements").is_dir()]  # packages
FURTHER = [pytest.param(name, marks=() if name == QUICK else pytest.mark.long) for name in OTHERS]
BASE = Path("data", "raw", "base.safetensors")
ONCE = Path("build", "verify", "one-process")
LIBRARY_TESTS = ROOT / "tests" / "library"
FIRST = re.compile(r"^one process +([0-9a-f]{16})  ([0-9a-f]{16})", re.MULTILINE)


def replaced(path: Path, pattern: str, new: str) -> None:
    """Replace a text that is there once."""
    text, count = re.subn(pattern, new, path.read_text())
    assert count == 1, f"{path}: {pattern!r} stands there {count} times"
    path.write_text(text)


# ---- what is generated

SHARED = {"raw", "sha256", "read", "prepared", "license", "source"}  # keys of `data` that the library reads
# Where a starter may speak of itself: all other files are the same for each.
ITS_OWN = re.compile(
    r"src/|artifacts/|data/|vendor/|params\.yaml|dvc\.(yaml|lock)|results\.lock|README\.md|pyproject\.toml|\.gitignore"
    r"|requirements/train-"
)
EXAMPLE = re.compile(r"(?i)digit|confusion|convnet|accuracy|test_loss\b|8x8|pixel|\bclasses\b")


def leftovers(baked: BakedProject) -> Iterator[str]:
    """What stands in a project though nothing there writes or reads it."""
    files, package = baked.files(), "src/repro_project"
    code = {Path(name).stem: baked.text(name) for name in files if name.startswith(package) and name.endswith(".py")}
    keys, pipeline = (yaml.safe_load(baked.text(name)) for name in ("params.yaml", "dvc.yaml"))
    stages = pipeline["stages"]

    readers = " ".join(text for name, text in code.items() if name != "config")
    for section in ("model", "data", "train"):
        names = keys[section].keys() - (SHARED if section == "data" else set())
        yield from (f"key {section}.{name}" for name in names if not re.search(rf"\.{name}\b", readers))
    yield from (f"params of {name}" for name, stage in stages.items() if not {*stage["params"]} <= keys.keys())

    outs = [out for stage in stages.values() for out in [*stage.get("outs", []), *stage.get("metrics", [])]]
    written = {name for out in outs for name in ([out] if isinstance(out, str) else out)}
    written |= {f"artifacts/{name}" for name in re.findall(r'out / "([\w.]+)"', code["evaluate"])}
    drawn = {name: column for plot in pipeline["plots"] for one in plot.values() for name, column in one["y"].items()}
    yield from (f"plot of {name}" for name in drawn if name not in written)
    for plot in pipeline["plots"]:
        for name, column in ((name, column) for one in plot.values() for name, column in one["y"].items()):
            if name == "artifacts/steps.csv" and not re.search(rf"\blog\(.*\b{column}=", code["train"]):
                yield f"column {column}"
    kept = re.findall(r"(?m)^!/(artifacts/.*)$", baked.text(".gitignore"))
    results = [*kept, *(name for name in files if name.startswith("artifacts/"))]
    yield from (f"result {name}" for name in results if name not in written)

    raw = {value for value in keys["data"].values() if str(value).startswith("data/raw/")}
    brought = [f"data/raw/{name[1:]}" for name in baked.text("data/raw/.gitignore").split()]
    brought += [name.removesuffix(".dvc") for name in files if name.startswith("data/raw/") and name.endswith(".dvc")]
    yield from (f"data {name}" for name in brought if name not in raw)
    yield from (f"missing {name}" for name in raw if not {name, f"{name}.dvc"} <= files.keys())


@pytest.fixture(scope="module", params=KNOWN)
def fresh(request: pytest.FixtureRequest, bake: Bake) -> BakedProject:
    """A project of each starter."""
    return bake(starter=request.param)


def test_starters_are_the_folders() -> None:
    """Each folder is asked for, and the hook takes it."""
    assert {path.parent.name for path in STARTERS.glob("*/params.yaml")} == {*KNOWN}
    hook = (ROOT / "hooks" / "pre_gen_project.py").read_text()
    assert re.search(r"^STARTERS = (\[.*\])", hook, re.MULTILINE)[1] == json.dumps(KNOWN)


def test_nothing_of_another_starter_is_left(fresh: BakedProject) -> None:
    assert [*leftovers(fresh)] == []
    assert not (fresh.path / "starters").exists() and "starters" not in fresh.run("git", "ls-files")
    assert len([name for name in fresh.files() if not re.match("vendor/|data/remote/", name)]) <= 60
    assert len(fresh.text("README.md").encode()) <= 8192


def test_no_other_file_speaks_of_the_example(fresh: BakedProject) -> None:
    """Nor does a file of the owner's tests, which are the same for each starter."""
    found = {name: EXAMPLE.findall(text) for name, text in fresh.texts().items() if not ITS_OWN.match(name)}
    assert {name for name, words in found.items() if words} == set()


@pytest.fixture(scope="module")
def language(bake: Bake) -> BakedProject:
    """A project whose files tests change, one at a time, and put back."""
    return bake(starter="language")


@pytest.mark.parametrize(("name", "old", "new", "left"), [
    ("params.yaml", "train:\n", "train:\n  shift: 1  # pixels\n", "key train.shift"),
    ("dvc.yaml", "plots:\n", "plots:\n  - Classes:\n      x: actual\n      y: {artifacts/confusion.csv: predicted}\n",
     "plot of artifacts/confusion.csv"),
    ("dvc.yaml", "{artifacts/steps.csv: loss}", "{artifacts/steps.csv: length}", "column length"),
    ("dvc.yaml", "params: [data, determinism]", "params: [data, images]", "params of prepare"),
    (".gitignore", "!/artifacts/metrics.json\n", "!/artifacts/metrics.json\n!/artifacts/confusion.csv\n",
     "result artifacts/confusion.csv"),
    ("data/raw/.gitignore", "/topics.txt.gz\n", "/topics.txt.gz\n/digits.csv.gz\n", "data data/raw/digits.csv.gz"),
])  # fmt: skip
def test_planted_leftover_is_found(language: BakedProject, name: str, old: str, new: str, left: str) -> None:
    """The control is the project before."""
    before, whole = [*leftovers(language)], language.text(name)
    replaced(language.path / name, re.escape(old), new.replace("\\", r"\\"))
    found = [*leftovers(language)]
    (language.path / name).write_text(whole)
    assert before == [] and found == [left]


def test_released_row_is_shown(fresh: BakedProject) -> None:
    """In the README, in evaluation.json and in metrics.json."""
    (row,) = yaml.safe_load(fresh.text("results.lock"))["results"]
    assert f"\n    {row['weights']}\n" in fresh.text("README.md")
    assert json.loads(fresh.text("artifacts/metrics.json")) == row["metrics"]
    evaluation = json.loads(fresh.text("artifacts/evaluation.json"))
    metrics = {name: value for name, value in row["metrics"].items() if name != "steps"}
    assert evaluation.items() >= {**metrics, "weights": row["weights"]}.items()
    assert len({*FIRST.findall(fresh.text("README.md"))}) == 1


# ---- what is trained


@pytest.fixture(scope="module")
def more(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment with what all starters add, made once, of their locks."""
    locks = [bake(starter=name).path / "requirements" / "train-cpu.txt" for name in ADDING]
    return copy_venv(tmp_path_factory.mktemp("more") / "venv", *locks).parents[1]


def of_starter(name: str, bake: Bake, project: InstalledProject, venv: Path) -> InstalledProject:
    """A project of a starter, in an environment that has its packages."""
    path = bake(starter=name).path
    return replace(project, path=path, env=in_venv(path, project.env, venv), python=venv / "bin" / "python")


@pytest.fixture(scope="module", params=FURTHER)
def laid(request: pytest.FixtureRequest, bake: Bake, project: InstalledProject) -> InstalledProject:
    """A project of a starter, its data prepared."""
    venv = request.getfixturevalue("more") if request.param in ADDING else VENV
    laid = of_starter(request.param, bake, project, venv)
    laid.run("python", "-m", "samebits", "prepare")
    return laid


def verify(laid: InstalledProject, *ways: str, keys: Iterable[str] = ()) -> str:
    """Run `samebits verify` with these ways only; return what it prints, whatever the outcome."""
    words = [word for way in ways for word in ("--only", way)] + [word for key in keys for word in ("--set", key)]
    return run("python", "-m", "samebits", "verify", *words, cwd=laid.path, env=laid.env, check=False).stdout


@pytest.mark.long
def test_lint_passes(laid: InstalledProject) -> None:
    laid.lint()


only = partial(pytest.mark.parametrize, "laid", indirect=True)


@pytest.mark.long
@only(["finetuning", "images", "tabular"])
def test_own_tests_pass(laid: InstalledProject) -> None:
    """Among them: each operation has a deterministic kernel, the locks fit pyproject.toml."""
    printed = laid.make("test", f"TESTS={OWN}")
    assert re.search(r"^\d+ passed in ", printed, re.MULTILINE), printed


@pytest.mark.long
@only([name for name in OTHERS if name != SMALLEST])
def test_kill_and_other_ranks_change_no_bit(laid: InstalledProject) -> None:
    """And the weights and the trace are those of the README, on any CPU."""
    printed = verify(laid, KILLED)
    rows = [line for line in printed.splitlines() if line.startswith(("one process ", KILLED))]
    assert len(rows) == 2 and all(row.endswith("EQUAL") for row in rows), printed
    assert FIRST.search(laid.text("README.md")).groups() == FIRST.search(printed).groups(), printed


# Each starter in one world of the golden set, and each world with some starter; `make golden` combines them all.
GOLDEN_WORLDS = {
    "digits": (3, "full", 0),
    "images": (2, "optimizer", 1),
    "language": (2, "full", 0),
    "series": (2, "none", 2),
    "finetuning": (3, "optimizer", 0),
    "tabular": (3, "none", 0),
    "blank": (1, "none", 1),
}


@pytest.mark.long
@only(KNOWN)
def test_short_run_gives_the_golden_digest(laid: InstalledProject, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["laid"]
    ranks, shard, workers = GOLDEN_WORLDS[name]
    keys = *golden.STARTERS[name], f"parallel.shard={shard}", f"loader.workers={workers}"
    row = golden.train_starter(laid.path, laid.env, ranks, *keys)
    assert row == json.loads(golden.GOLDEN.read_text())["digests"][f"starters/{name}"], "see: make golden"


@pytest.mark.long
@only(["images", "tabular"])
def test_weights_are_evaluated_as_at_the_end_of_the_run(laid: InstalledProject) -> None:
    """The stage that reads them back finds the same metrics: of an average, and of the best ones."""
    verify(laid, "once more") if not (laid.path / ONCE).is_dir() else None
    laid.run("python", "-m", "samebits", "evaluate", "--out", ONCE)
    metrics, evaluation = (json.loads(laid.text(ONCE / name)) for name in ("metrics.json", "evaluation.json"))
    assert evaluation.items() >= {name: value for name, value in metrics.items() if name != "steps"}.items()


@pytest.mark.long
@only([SMALLEST])
def test_make_repro_ends_as_released(laid: InstalledProject) -> None:
    """And leaves nothing changed; so does a short run. Of the others the short runs alone are compared."""
    (row,) = yaml.safe_load(laid.text("results.lock"))["results"]
    printed = laid.make("repro")
    assert f"reproduced bit for bit: {row['source']} (weights {row['weights']})" in printed
    assert "the outputs are those of the committed dvc.lock" in printed
    (short,) = {*FIRST.findall(laid.text("README.md"))}
    (key,) = yaml.safe_load(laid.text("params.yaml"))["verify"]["shorten"]
    printed = laid.run("python", "-m", "samebits", "train", "--set", key, "--out", ONCE)
    assert re.search(rf"^weights +{short[0]}\w+\ntrace +{short[1]}", printed, re.MULTILINE), printed
    assert laid.run("git", "status", "--porcelain") == ""


@pytest.mark.long
def test_address_is_the_released_one(laid: InstalledProject) -> None:
    """So `samebits check` compares its bits, not its metrics alone."""
    (row,) = yaml.safe_load(laid.text("results.lock"))["results"]
    assert yaml.safe_load(laid.run("python", "-m", "samebits", "address"))["address"] == row["address"]


@pytest.mark.long
@only([PRETRAINED])
def test_doctor_finds_nothing_left_over(laid: InstalledProject) -> None:
    """Of a starter that nobody has edited; tests of the doctor plant what it names."""
    rows = left_of_the_starter(laid)
    assert len(rows) == 5 and {row["state"] for row in rows} == {"ok"}, rows


@pytest.mark.long
@only([PRETRAINED])
def test_other_weights_to_start_from_are_refused(laid: InstalledProject) -> None:
    """By name, before anything is written: the content address holds the SHA-256 that was asked for."""
    whole = (laid.path / BASE).read_bytes()
    (laid.path / BASE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = run("python", "-m", "samebits", "prepare", cwd=laid.path, env=laid.env, check=False)
    (laid.path / BASE).write_bytes(whole)
    assert done.returncode == 2 and done.stdout.startswith(f"{BASE}: SHA-256 "), done.stdout


# ---- networks of other people

PLACES = "1,none", "3,none", "3,full"  # ranks, parallel.shard
FAULTY = "lstm"


@pytest.fixture(scope="module")
def strangers(bake: Bake, project: InstalledProject, more: Path) -> InstalledProject:
    """A project whose model.py holds these networks, its data prepared."""
    path = bake(starter=networks.STARTER).path
    networks.lay(path)
    commit_all(path, project.env)
    laid = replace(project, path=path, env=in_venv(path, project.env, more), python=more / "bin" / "python")
    laid.run("python", "-m", "samebits", "prepare")
    return laid


@pytest.fixture(scope="module")
def digests(strangers: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What is left of a training of each network on each of these places: one digest, where none changes a bit.

    Of one network also where one exchange adds in the backend's order: that is the planted fault.
    """
    held = strangers.run("python", "-c", f"from {strangers.package}.model import NETWORKS; print(*NETWORKS)").split()
    cases = [f"{name},4,{place},1,{place[0]},nothing" for name in held for place in PLACES]
    cases += [f"{FAULTY},4,{place},1,{place[0]},backend" for place in PLACES[:2]]
    ranks = "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=3"
    env, out = {**strangers.env, "OMP_NUM_THREADS": "1"}, tmp_path_factory.mktemp("digests") / "digests"
    run("python", *ranks, "strangers.py", strangers.package, out, *cases, cwd=LIBRARY_TESTS, env=env)
    found: dict[str, set[str]] = {}
    for case, digest in json.loads(out.read_text())["digests"].items():
        name, fault = case.split(",")[0], case.split(",")[-1]
        found.setdefault(name if fault == "nothing" else fault, set()).add(digest)
    return found


@pytest.mark.long
def test_worlds_change_no_bit_of_networks_of_other_people(digests: dict[str, set[str]]) -> None:
    """Of all those that docs/networks.md lists, nor do shards."""
    listed = re.findall(r"^\| ([a-z0-9-]+) \| [\d,]+ \|", networks.RESULT.read_text(), re.MULTILINE)
    found = {name: each for name, each in digests.items() if name != "backend"}
    assert list(found) == listed and all(len(each) == 1 for each in found.values()), found


@pytest.mark.long
def test_sum_of_the_backend_is_found(digests: dict[str, set[str]]) -> None:
    """The planted fault."""
    assert len(digests["backend"]) == 2


@pytest.mark.long
def test_gradients_of_1e30_are_trained_on(strangers: InstalledProject) -> None:
    """They are finite, so `nonfinite: stop` stops nothing: not in one process, nor on 2 ranks that are killed."""
    train, keys = strangers.path / "src" / strangers.package / "train.py", strangers.path / "params.yaml"
    before = train.read_text(), keys.read_text()
    # the gradients of this one are small: such a loss gives some near 1e33
    replaced(train, r"F\.cross_entropy\(model\(images\), labels\)", r"1e34 * \g<0>")
    replaced(keys, r"(?<=  name: )\S+", FAULTY)
    printed = verify(strangers, KILLED, keys=("train.epochs=1",))
    train.write_text(before[0])
    keys.write_text(before[1])
    assert "\nEQUAL: 2 of 2 trainings\n" in printed, printed
