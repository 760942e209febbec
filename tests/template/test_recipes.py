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
from bake import ROOT, VENV, in_venv
from baked import STRICT, Bake, InstalledProject, commit_all, copy_venv, run

KILLED = "killed and resumed on 2 ranks"
WAYS = {"series": ("3 ranks, 1 worker", "neutral keys varied"), "language": ("neutral keys varied",)}  # beyond KILLED
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
def more(bake: Bake, project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment with what all recipes add, made once, of their lock."""
    path, python = bake().path, copy_venv(tmp_path_factory.mktemp("more") / "venv")
    for name in ADDING:
        tool.add_packages(name, path)
    lock = path / "requirements" / "train-cpu.txt"
    project.run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", lock)
    return python.parents[1]


@pytest.fixture(scope="module")
def base(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a short training of the project as it is generated."""
    out = tmp_path_factory.mktemp("base")
    settings = "--set", "train.epochs=1", "--set", "tracking.enabled=false", "--out", out
    project.run(project.python, "-m", "samebits", "train", *settings)
    return out / "model.safetensors"


def with_recipe(
    name: str, path: Path, project: InstalledProject, venv: Path, request: pytest.FixtureRequest
) -> InstalledProject:
    """A project in this folder with a recipe laid over it, in an environment that has its packages."""
    lay(name, path)
    if name == PRETRAINED:
        base = shutil.copy(request.getfixturevalue("base"), path / BASE)
        sha256 = hashlib.sha256(base.read_bytes()).hexdigest()
        replaced(path / "params.yaml", r"(?<=base_sha256: )\w+", sha256)
    commit_all(path, project.env)
    return replace(project, path=path, env=in_venv(path, project.env, venv), python=venv / "bin" / "python")


@pytest.fixture(scope="module", params=RECIPES)
def laid(request: pytest.FixtureRequest, bake: Bake, project: InstalledProject) -> InstalledProject:
    """A project with a recipe laid over it, its data prepared."""
    venv = request.getfixturevalue("more") if request.param in ADDING else VENV
    laid = with_recipe(request.param, bake().path, project, venv, request)
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
@only(["finetuning", "images"])
def test_own_tests_pass(laid: InstalledProject) -> None:
    """Among them: each operation has a deterministic kernel, the locks fit pyproject.toml."""
    printed = laid.make("test", f"TESTS={OWN}")
    assert re.search(r"^\d+ passed in ", printed, re.MULTILINE), printed


def test_ways_to_train_change_no_bit(laid: InstalledProject, request: pytest.FixtureRequest) -> None:
    """And the weights are those of the recipe's README, on any CPU, if they start where it did."""
    name = request.node.callspec.params["laid"]
    ways = KILLED, *(() if request.config.option.markexpr == "not long" else WAYS.get(name, ()))
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
    """The planted fault: an average of one's own that `state` does not name begins anew after a kill."""
    train = laid.path / "src" / laid.package / "train.py"
    whole = train.read_text()
    replaced(train, re.escape(', state={"average": average}'), "")
    replaced(train, r"sb\.Average(?=\(model)", 'type("Own", (sb.Average,), {"_held": lambda self: None})')
    printed = verify(laid, KILLED, keys=("model.width=4", "model.depth=1"))
    train.write_text(whole)
    assert re.search(rf"^{KILLED} .* DIFFERS$", printed, re.MULTILINE), printed


@pytest.mark.long
@only(["language"])
def test_tied_embeddings_are_sharded(laid: InstalledProject, tmp_path: Path) -> None:
    """One digest of weights and trace, whatever a rank holds: with none, optimizer and full, on 1 to 3 ranks."""
    strict = json.loads(os.environ[STRICT])  # what is forked cannot start itself again
    env = {**laid.env, **strict, "REPRO_PROJECT": str(laid.path)}
    lines = run(laid.python, "tied.py", tmp_path, cwd=LIBRARY_TESTS, env=env).stdout.splitlines()
    shards, weights, traces, sharded = zip(*map(str.split, lines), strict=True)
    assert len(lines) == 3 and len({*weights}) == len({*traces}) == 1
    assert [word == "True" for word in sharded] == [shard == "full" for shard in shards]


# ---- networks of other people

PLACES = "1,none", "3,none", "2,optimizer", "3,full"  # ranks, parallel.shard
FAULTY = "lstm"


@pytest.fixture(scope="module")
def strangers(bake: Bake, project: InstalledProject, more: Path) -> InstalledProject:
    """A project whose model.py holds these networks, its data prepared."""
    path = bake().path
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
    replaced(train, r"F\.cross_entropy\(model\(images\), labels\)", r"1e30 * \g<0>")
    replaced(keys, r"(?<=  name: )\S+", "mobilenet-v2")
    printed = verify(strangers, KILLED, keys=("train.epochs=1",))
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
