"""A generated project whose files were replaced as the page "Make it yours" says: another network, other data.

The files lie in `yours/`: gauges of tides in place of digits, items that are mappings, a regression, another metric, a
training of so many steps, another section of keys. No other file is touched, until the doctor has named what is left of
the starter.
"""

import hashlib
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from bake import ROOT, in_venv
from baked import Bake, InstalledProject, left_of_the_starter, run

YOURS = Path(__file__).parent / "yours"
PAGE = ROOT / "samebits" / "docs" / "your-model.md"
LISTED = re.findall(r"(?m)^\d\. `([\w.]+)`: ", PAGE.read_text())  # the files that an owner touches
COMMANDS = ("data/raw/.gitignore", "data/raw/tides.tsv.dvc", "dvc.lock", "results.lock", "artifacts/")  # write these
RAW = Path("data", "raw", "tides.tsv")
SHORT = "train.steps=24"


def table() -> str:
    """The levels at three gauges, hour by hour: the dataset."""
    numbers = random.Random(0)
    rows = ([f"{numbers.uniform(-1, 1):.3f}" for _ in range(3)] for _ in range(120))
    return "\n".join("\t".join(row) for row in [("north", "west", "south"), *rows]) + "\n"


def change(path: Path, *changes: tuple[str, str]) -> None:
    """Replace texts in a file, each of which stands there once."""
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{path}: {old!r} stands there {text.count(old)} times"
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture(scope="module")
def yours(bake: Bake, project: InstalledProject) -> InstalledProject:
    """The project with its files replaced, committed, not yet run; `project` has made the environment."""
    baked = bake()
    env = in_venv(baked.path, baked.env)
    yours = replace(project, path=baked.path, env=env)
    root = baked.path

    for path in YOURS.glob("*.py"):
        shutil.copy(path, root / "src" / yours.package)
    (root / RAW).write_text(table())
    yours.run("dvc", "add", "--quiet", RAW)

    shipped = yours.text("params.yaml")
    library = shipped[shipped.index("\nparallel:") :]
    sha256 = hashlib.sha256((root / RAW).read_bytes()).hexdigest()
    keys = (YOURS / "params.yaml").read_text().replace("SHA256", sha256)
    (root / "params.yaml").write_text(keys + library)
    change(
        root / "params.yaml",
        ("train.epochs=2", SHORT),
        ("  enabled: true", "  enabled: false"),
        ("vary: [train.evaluate_every=1]", "vary: [train.log_every=3]"),
    )
    commit(yours)
    return yours


def commit(yours: InstalledProject) -> None:
    """Commit all that git does not ignore."""
    yours.run("git", "add", "--all")
    owner = "-c", "user.name=owner", "-c", "user.email=owner@example.invalid"
    yours.run("git", *owner, "commit", "--quiet", "--message", "ours")


@pytest.mark.long
def test_lint_passes(yours: InstalledProject) -> None:
    yours.lint()


def test_page_shows_this_loop() -> None:
    """The lines of the page on early stopping stand in this order in the loop that is tried here."""
    page = (ROOT / "samebits" / "docs" / "train.md").read_text()
    shown = page[page.index("```python") :].partition("\n")[2].partition("```")[0]
    lines = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    rest = iter((YOURS / "train.py").read_text().splitlines())
    assert len(lines) > 10 and [line for line in lines if line not in rest] == []


@pytest.mark.long
def test_own_tests_pass(yours: InstalledProject) -> None:
    """None of them asks for digits; one of them is a short `samebits verify`."""
    printed = yours.make("test")
    assert re.search(r"^\d+ passed in ", printed, re.MULTILINE), printed


@pytest.mark.long
def test_pipeline_runs_once_and_its_result_is_accepted(yours: InstalledProject) -> None:
    """What was reproduced is not run again, and expected from then on."""
    yours.run("dvc", "repro")
    metrics = json.loads(yours.text("artifacts/metrics.json"))
    assert metrics.keys() == {"mean_error", "steps"}
    rows = [json.loads(row) for row in yours.text("artifacts/metrics.jsonl").splitlines()]
    errors: dict[int, float] = {}
    for row in rows:  # the last one is of the weights that were loaded in the end
        if "mean_error" in row["metrics"]:
            errors.setdefault(row["step"] + 1, row["metrics"]["mean_error"])
    best, *waited = sorted(errors, key=lambda step: (errors[step] > min(errors.values()), step))
    stated = json.loads(yours.text("artifacts/receipt.json"))["predicate"]
    assert metrics == {"mean_error": errors[best], "steps": waited[-1]} and waited[-1] < 48
    assert stated["best"] == {"step": best, "value": errors[best]}
    assert stated["stopped"] == {"reason": "no smaller error in 2 evaluations", "planned": 48}
    assert json.loads(yours.text("artifacts/evaluation.json")) == {"mean_error": metrics["mean_error"]}
    assert "Data and pipelines are up to date." in yours.run("dvc", "repro")

    yours.run("python", "-m", "samebits", "accept", "artifacts", "--source", "the first run on tides")
    commit(yours)
    printed = yours.run("python", "-m", "samebits", "check")
    assert "reproduced bit for bit: the first run on tides" in printed
    assert "the outputs are those of the committed dvc.lock" in printed


def test_no_other_file_is_touched(yours: InstalledProject) -> None:
    """Those that the page lists are; git compares each file with the one that was generated."""
    generated = yours.run("git", "rev-list", "--max-parents=0", "HEAD").strip()
    yours.run("git", "add", "--all")
    changed = yours.run("git", "diff", "--cached", "--name-only", generated).splitlines()
    listed = {f"src/{yours.package}/{name}" if name.endswith(".py") else name for name in LISTED}
    assert {name for name in changed if not name.startswith(COMMANDS)} == listed
    assert len(listed) == 7


def leftovers(yours: InstalledProject) -> dict[str, str]:
    """What the doctor says that is left of the starter."""
    found = left_of_the_starter(yours)
    assert len(found) == 5
    return {row["name"]: row["seen"] for row in found if row["state"] != "ok"}


@pytest.mark.long
def test_doctor_names_what_the_starter_left(yours: InstalledProject) -> None:
    """And nothing, once it is removed."""
    curves = "gradient_norm of artifacts/steps.csv, learning_rate of artifacts/steps.csv"
    assert leftovers(yours) == {
        "results": "results.lock: the released row is the starter's: this project has another code, config, data, seed",
        "plots": f"nothing in src/{yours.package} writes {curves}, artifacts/confusion.csv",
        "dataset": "no key and no code names data/raw/digits.csv.gz",
        "artifacts": f"git tracks artifacts/confusion.csv, and nothing in src/{yours.package} writes that",
    }
    (yours.path / "data" / "raw" / "digits.csv.gz").unlink()
    yours.run("git", "rm", "--quiet", "data/raw/digits.csv.gz.dvc", "artifacts/confusion.csv")
    stages, results = yours.path / "dvc.yaml", yours.path / "results.lock"
    stages.write_text(stages.read_text().partition("  - Length of the gradient")[0])
    rows = re.split(r"(?m)^(?=  - source: )", results.read_text())
    results.write_text("".join(row for row in rows if "this template was released with" not in row))
    assert leftovers(yours) == {}
    commit(yours)


def test_clone_has_the_data_that_the_owner_has_pushed(yours: InstalledProject, tmp_path: Path) -> None:
    """Continuous integration too, without a word on data in the workflow: DVC brings them when they are missed."""
    assert "dvc pull" not in yours.text(".github/workflows/ci.yml")
    yours.run("dvc", "push", "--quiet", f"{RAW}.dvc")
    commit(yours)
    yours.run("git", "clone", "--quiet", ".", tmp_path / "clone")
    clone = replace(yours, path=tmp_path / "clone", env=in_venv(tmp_path / "clone", yours.env))
    clone.run("python", "-m", "samebits", "check-data")
    assert clone.text(str(RAW)) == table()


# ---- the project's own tests find the faults that they are for

# What is wrong: the file, a text there, what stands in its place; and the tests that fail of it.
FAULTS = (
    ("model.py", "    return Perceptron(", "    torch.seed()\n    return Perceptron(",
     "two_models_of_one_seed_have_equal_weights same_micro_batch_gives_equal_gradients_twice"),
    ("prepare.py", "levels[:early])", "levels[:early] + np.random.default_rng().random())",
     "preparing_twice_gives_the_same_bytes"),
    ("config.py", "sb.Neutral[PositiveInt]", "sb.Neutral[object]", "wrong_values_are_refused_by_name"),
    ("params.yaml", "held_out: 0.25", "held_out: 0.0", "both_sets_hold_samples"),
    ("params.yaml", "  # of SGD", "", "each_key_of_the_file_is_explained_beside_it"),
    ("params.yaml", SHORT, "train.epochs=1", "shortened_training_fits_the_config short_trainings_give_the_same_bits"),
    ("pyproject.toml", '"numpy>=2.1,<3"', '"numpy>=99"', "locks_fit_pyproject"),
)  # fmt: skip
OF_DATA = (
    "workers_change_no_sample item_depends_on_seed_epoch_and_index_alone each_tensor_of_a_batch_has_a_row_per_sample"
)
STUCK = "            batch['next'].view(-1).put_(torch.tensor([0]), torch.tensor([0.0]))\n"  # which wins is not said


@pytest.fixture
def copy(yours: InstalledProject, tmp_path: Path) -> InstalledProject:
    """A copy to plant faults in."""
    copy = tmp_path / "copy"
    shutil.copytree(yours.path, copy, ignore=shutil.ignore_patterns(".*", "build", "artifacts"))
    return replace(yours, path=copy, env=in_venv(copy, yours.env))


def failed(copy: InstalledProject, *files: str) -> set[str]:
    """The project's own tests that fail."""
    done = run(copy.python, "-m", "pytest", "-rfE", *files, cwd=copy.path, env=copy.env, check=False)
    return set(re.findall(r"^FAILED \S+::test_(\w+)", done.stdout, re.MULTILINE))


def place(copy: InstalledProject, name: str) -> Path:
    """A file of the owner's."""
    return copy.path / ("src/" + copy.package if name.endswith(".py") else "") / name


@pytest.mark.long
def test_planted_faults_are_found(copy: InstalledProject) -> None:
    """Each by the tests that are for it, and by no others."""
    for name, old, new, _ in FAULTS:
        change(place(copy, name), (old, new))
    found = failed(copy)
    assert found == {test for *_, tests in FAULTS for test in tests.split()}
    # after them: with it no test gets a batch
    change(place(copy, "data.py"), ("            window *= random.choice((-1, 1))", "            self.noise += 0.01"))
    assert failed(copy, "tests/test_data.py") - found == set(OF_DATA.split())


@pytest.mark.long
def test_operation_without_a_deterministic_kernel_is_found(copy: InstalledProject) -> None:
    """By each test that computes a loss."""
    change(place(copy, "train.py"), ("            step.backward(", STUCK + "            step.backward("))
    assert "each_operation_has_a_deterministic_kernel" in failed(copy, "tests/test_model.py")
