"""Recipes: models and data as people bring them keep the contract, and no line of the library is changed for one."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import networks
import pytest
import recipe as tool
from bake import MORE, ROOT, VENV, in_venv, python_path
from baked import STRICT, Bake, InstalledProject, commit_all, run

WAYS = "3 ranks, 1 worker", "killed and resumed on 2 ranks", "neutral keys varied"
OWN = "tests/test_config.py tests/test_data.py tests/test_locks.py tests/test_model.py"  # and `samebits verify`
QUICK, PRETRAINED = "series", "finetuning"
ADDING = [name for name in tool.known() if (tool.RECIPES / name / tool.PACKAGES).is_file()]  # packages
RECIPES = [pytest.param(name, marks=() if name == QUICK else pytest.mark.long) for name in tool.known()]
BASE = Path("data", "raw", "base.safetensors")
ONCE = Path("build", "verify", "one-process")
LIBRARY_TESTS = ROOT / "tests" / "library"
FIRST = re.compile(r"^one process +([0-9a-f]{16})", re.MULTILINE)


def lay(name: str, project: Path) -> str:
    """Lay a recipe over a project; return what is printed."""
    return run(sys.executable, ROOT / "tools" / "recipe.py", name, project).stdout


def replaced(path: Path, pattern: str, new: str) -> None:
    """Replace a text that is there once."""
    text, count = re.subn(pattern, new, path.read_text())
    assert count == 1, f"{path}: {pattern!r} stands there {count} times"
    path.write_text(text)


@pytest.fixture(scope="module")
def more(bake: Bake, project: InstalledProject) -> Path:
    """The environment with what all recipes add, made once: of each recipe's lock it would be made four times."""
    path = bake().path
    for name in ADDING:
        tool.add_packages(name, path)
    run("make", "environment", f"VENV={MORE}", cwd=path, env={**project.env, "LOCKS_ONLY": "1"})
    return MORE


@pytest.fixture(scope="module", params=RECIPES)
def laid(
    request: pytest.FixtureRequest, bake: Bake, project: InstalledProject, tmp_path_factory: pytest.TempPathFactory
) -> InstalledProject:
    """A project with a recipe laid over it, its data prepared; `project` has made the environment that most share."""
    name, path = request.param, bake().path
    lay(name, path)
    venv = request.getfixturevalue("more") if name in ADDING else VENV
    if name == PRETRAINED:
        shutil.copy(pretrained(project, tmp_path_factory.mktemp("base")), path / BASE)
        sha256 = hashlib.sha256((path / BASE).read_bytes()).hexdigest()
        replaced(path / "params.yaml", r"(?<=base_sha256: )\w+", sha256)
    commit_all(path, project.env)
    env = {**project.env, "PATH": f"{venv}/bin:{project.env['PATH']}", "PYTHONPATH": python_path(path)}
    laid = replace(project, path=path, env=env, python=venv / "bin" / "python")
    laid.run("python", "-m", "samebits", "prepare")
    return laid


def pretrained(project: InstalledProject, out: Path) -> Path:
    """The weights of a short training of the project as it is generated."""
    settings = "--set", "train.epochs=1", "--set", "tracking.enabled=false", "--out", out
    project.run(project.python, "-m", "samebits", "train", *settings)
    return out / "model.safetensors"


def make(laid: InstalledProject, *words: str) -> str:
    """Run make in the recipe's environment, as it is."""
    return laid.run("make", "--assume-old=environment", f"VENV={laid.python.parents[1]}", *words)


def verify(laid: InstalledProject, *ways: str) -> str:
    """Run `samebits verify` with these ways only; return what it prints, whatever the outcome."""
    only = [word for way in ways for word in ("--only", way)]
    return run("python", "-m", "samebits", "verify", *only, cwd=laid.path, env=laid.env, check=False).stdout


@pytest.mark.long
def test_lint_passes(laid: InstalledProject) -> None:
    """Ruff, mypy and import-linter, with the project's own settings."""
    make(laid, "lint")


@pytest.mark.long
def test_own_tests_pass(laid: InstalledProject) -> None:
    """Among them: each operation has a deterministic kernel, the locks fit pyproject.toml."""
    printed = make(laid, "test", f"TESTS={OWN}")
    assert re.search(r"^\d+ passed in ", printed, re.MULTILINE), printed


def test_ways_to_train_change_no_bit(laid: InstalledProject, request: pytest.FixtureRequest) -> None:
    """And the weights are those of the recipe's README, on any CPU, if they start where it did."""
    name = request.node.callspec.params["laid"]
    ways = WAYS[1:2] if request.config.option.markexpr == "not long" else WAYS if name == QUICK else WAYS[1:]
    printed = verify(laid, *ways)
    rows = [line for line in printed.splitlines() if line.startswith(("one process ", *ways))]
    assert len(rows) == len(ways) + 1 and all(row.endswith("EQUAL") for row in rows), printed
    if name != PRETRAINED:
        message = FIRST.search((tool.RECIPES / name / "README.md").read_text())
        assert message and message[1] == FIRST.search(printed)[1], printed


def test_weights_are_evaluated_as_at_the_end_of_the_run(laid: InstalledProject) -> None:
    """The stage that reads them back finds the same metrics."""
    verify(laid, "once more") if not (laid.path / ONCE).is_dir() else None
    laid.run("python", "-m", "samebits", "evaluate", "--out", ONCE)
    metrics, evaluation = (json.loads(laid.text(ONCE / name)) for name in ("metrics.json", "evaluation.json"))
    assert evaluation.items() >= {name: value for name, value in metrics.items() if name != "steps"}.items()


only = partial(pytest.mark.parametrize, "laid", indirect=True)


@pytest.mark.long
@only([PRETRAINED])
def test_other_weights_to_start_from_are_refused(laid: InstalledProject) -> None:
    """By name, before anything is written: the content address holds the SHA-256 that was asked for."""
    whole = (laid.path / BASE).read_bytes()
    (laid.path / BASE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = run("python", "-m", "samebits", "prepare", cwd=laid.path, env=laid.env, check=False)
    (laid.path / BASE).write_bytes(whole)
    assert done.returncode == 2 and done.stdout.startswith(f"{BASE}: SHA-256 "), done.stdout


@pytest.mark.long
@only(["images"])
def test_average_that_no_checkpoint_holds_is_found(laid: InstalledProject) -> None:
    """The planted fault: without `state` the average of the weights begins anew after a kill."""
    train = laid.path / "src" / laid.package / "train.py"
    whole = train.read_text()
    replaced(train, re.escape(', state={"average": average}'), "")
    printed = verify(laid, "killed and resumed on 2 ranks")
    train.write_text(whole)
    assert re.search(r"^killed and resumed on 2 ranks .* DIFFERS$", printed, re.MULTILINE), printed


@pytest.mark.long
@only(["language"])
def test_tied_embeddings_are_sharded(laid: InstalledProject, tmp_path: Path) -> None:
    """One digest of weights and trace, whatever a rank holds: with none, optimizer and full, on 1 to 3 ranks."""
    strict = json.loads(os.environ[STRICT])  # what is forked cannot start itself again
    env = {**laid.env, **strict, "REPRO_PROJECT": str(laid.path)}
    lines = run(laid.python, "tied.py", tmp_path, cwd=LIBRARY_TESTS, env=env).stdout.splitlines()
    shards, weights, traces, sharded = zip(*map(str.split, lines), strict=True)
    assert len(lines) == 4 and len({*weights}) == len({*traces}) == 1
    assert [word == "True" for word in sharded] == [shard == "full" for shard in shards]


# ---- networks of other people

PLACES = ("1,none", "2,none", "3,none", "2,optimizer", "3,optimizer", "2,full", "3,full")  # ranks, parallel.shard


@pytest.fixture(scope="module")
def strangers(bake: Bake, project: InstalledProject, more: Path) -> InstalledProject:
    """A project whose model.py holds these networks, its data prepared."""
    path = bake().path
    networks.lay(path)
    commit_all(path, project.env)
    laid = replace(project, path=path, env=in_venv(path, project.env, more), python=more / "bin" / "python")
    laid.run("python", "-m", "samebits", "prepare")
    return laid


def digests(
    laid: InstalledProject, out: Path, names: Iterable[str], places: Iterable[str] = PLACES, fault: str = "nothing"
) -> dict[str, set[str]]:
    """What is left of a training of each network on each of these places: one digest, where none changes a bit."""
    cases = [f"{name},4,{place},1,{place[0]},{fault}" for name in names for place in places]
    ranks = "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=3"
    env = {**laid.env, "OMP_NUM_THREADS": "1"}
    run("python", *ranks, "strangers.py", laid.package, out, *cases, cwd=LIBRARY_TESTS, env=env)
    found: dict[str, set[str]] = {}
    for case, digest in json.loads(out.read_text())["digests"].items():
        found.setdefault(case.partition(",")[0], set()).add(digest)
    return found


@pytest.mark.long
def test_worlds_change_no_bit_of_networks_of_other_people(strangers: InstalledProject, tmp_path: Path) -> None:
    """Of all those that docs/networks.md lists, nor do shards."""
    held = strangers.run("python", "-c", f"from {strangers.package}.model import NETWORKS; print(*NETWORKS)").split()
    listed = re.findall(r"^\| ([a-z0-9-]+) \| [\d,]+ \|", networks.RESULT.read_text(), re.MULTILINE)
    found = digests(strangers, tmp_path / "digests", held)
    assert list(found) == held == listed and all(len(each) == 1 for each in found.values()), found


@pytest.mark.long
def test_sum_of_the_backend_is_found(strangers: InstalledProject, tmp_path: Path) -> None:
    """The planted fault: one exchange adds in the backend's order."""
    found = digests(strangers, tmp_path / "digests", ["swin"], ("1,none", "3,none"), "backend")
    assert len(found["swin"]) == 2


@pytest.mark.long
def test_gradients_of_1e30_are_trained_on(strangers: InstalledProject) -> None:
    """They are finite, so `nonfinite: stop` stops nothing: not in one process, nor on 2 ranks that are killed."""
    train, keys = strangers.path / "src" / strangers.package / "train.py", strangers.path / "params.yaml"
    before = train.read_text(), keys.read_text()
    replaced(train, r"F\.cross_entropy\(model\(images\), labels\)", r"1e30 * \g<0>")
    replaced(keys, r"(?<=  name: )\S+", "mobilenet-v2")
    printed = verify(strangers, "killed and resumed on 2 ranks")
    train.write_text(before[0])
    keys.write_text(before[1])
    assert "\nEQUAL: 2 of 2 trainings\n" in printed, printed


def test_recipe_is_laid_once_or_twice_alike(bake: Bake) -> None:
    """And changes none of the library; its own tests need no change either."""
    for name in tool.known():
        before = bake()
        lay(name, before.path)
        once = before.files()
        lay(name, before.path)
        assert before.files() == once
        assert "repro/" not in before.run("git", "status", "--porcelain")
        drawn, written = ("confusion.csv" in path.read_text() for path in (
            before.path / "dvc.yaml", before.path / "src" / "repro_project" / "evaluate.py"))  # fmt: skip
        assert drawn == written
        for pointer in (tool.RECIPES / name).rglob("*.dvc"):  # a clone has its data, and git ignores them beside it
            assert once[f"data/remote/files/md5/{tool.md5(pointer)}"][1] == pointer.with_suffix("").read_bytes()
            before.run("git", "check-ignore", "--quiet", f"data/raw/{pointer.stem}")


def test_slip_is_refused_in_a_line(tmp_path: Path) -> None:
    """An unknown recipe, a folder that is no project."""
    tried = [
        run(sys.executable, ROOT / "tools" / "recipe.py", *words, check=False)
        for words in (("sereis", tmp_path), ("series", tmp_path), ())
    ]
    assert [done.returncode for done in tried] == [2, 2, 2]
    assert ["NAME PROJECT wanted; names: " in done.stdout for done in tried] == [True, False, True]
    assert tried[1].stdout.startswith(f"{tmp_path}: no src/PACKAGE/train.py seen")
