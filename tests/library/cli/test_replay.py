"""A recorded run is made again from its receipt: its commit, its uncommitted code, its data, its config."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from click.testing import Result
from clone import Forked, command, git, project_in, verb
from support import OURS, PACKAGE, python

from samebits.address.address import digest
from samebits.address.manifest import sha256_file
from samebits.address.release import library
from samebits.analysis import replay as replay_module
from samebits.analysis import sources
from samebits.analysis.trust import Trust, require_trusted
from samebits.base.project import Project
from samebits.core import ARITHMETIC
from samebits.core.errors import RunError, UserError
from samebits.record import names
from samebits.record.receipt import Receipt, read
from samebits.start import trainings

CLASS = "cpu-portable/torch-1.2.3"


def state(project: Path) -> dict[str, Any]:
    """The user's work tree and git's view of it: each file but those that a replay may write."""
    files = [path for path in project.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    own = [path for path in files if path.relative_to(project).parts[0] not in (".git", "build", "artifacts-replay")]
    status = subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True, text=True).stdout
    trees = subprocess.run(["git", "worktree", "list"], cwd=project, capture_output=True, text=True).stdout
    return {"files": {str(path): (path.stat().st_mtime_ns, sha256_file(path)) for path in own}} | {
        "status": status,
        "trees": trees,
        "head": (project / ".git" / "HEAD").read_text(),
    }


Replay = Callable[..., Result]


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """A function that asks the verb in this process, in the folder of a project; what it trains is forked."""
    monkeypatch.setattr(trainings, "run", Forked(tmp_path))

    def replay(project: Path, *words: str | Path) -> Result:
        monkeypatch.chdir(project)
        return verb("replay", *words, project=project_in(project))

    return replay


OVER = ["run", "./other/../run", "link", "run/new", ".", "run/earlier/x/.."]


@pytest.mark.parametrize("out", OVER)
def test_run_is_not_made_over_the_one_that_it_is_compared_with(out: str, in_a_folder: None):
    for name in ("run", "other"):
        Path(name).mkdir()
        Path(name, names.RUN).touch()
    Path("link").symlink_to("run")
    for source in (Path("run"), Path("run", names.RECEIPT)):
        with pytest.raises(UserError, match=r"^--out .*: the run that is compared with, or a folder in or above it"):
            replay_module.replay(OURS, source, Path(out), None, print, Trust())
        with pytest.raises(UserError, match="missing; the receipt of a finished run is wanted"):  # the control
            replay_module.replay(OURS, source, Path("other"), None, print, Trust())


def test_library_is_that_of_the_commit_or_this_one_where_core_is_that_of_the_run(tmp_path: Path):
    tree = Project(tmp_path / "src" / PACKAGE)
    tree.package.mkdir(parents=True)
    shutil.copy(OURS.root / "pyproject.toml", tmp_path)
    preimage = {"core": {"step.py": "d" * 64}}
    run = {"code": {"commit": "c" * 40}, "preimage": preimage, "library": {"template": "0.0.7"}}
    message = r"^commit c{12} holds no copy of the library\. Core: expected earlier release \w{8}, got "
    with pytest.raises(
        UserError, match=message + r"arithmetic 1\. Release 0\.0\.7 of the template can replay this run"
    ):
        replay_module._with_library(OURS, tmp_path, run)
    assert not (tmp_path / "vendor").exists()
    same = run | {"preimage": {"core": {"arithmetic": ARITHMETIC}}}
    assert replay_module._with_library(OURS, tmp_path, same) == tree
    assert library(tree) == library(OURS)
    committed = {"code": run["code"]}  # the commit holds it, whatever core the run had
    assert replay_module._with_library(OURS, tmp_path, committed) == tree
    (tmp_path / "vendor" / "samebits" / "__main__.py").unlink()  # as in a commit of an older layout
    with pytest.raises(UserError, match=r"^commit c{12}: its library has no command samebits, which came with a later"):
        replay_module._with_library(OURS, tmp_path, committed)


@pytest.mark.long
def test_receipt_of_uncommitted_code_keeps_what_a_run_reads_of_it(project: Path):
    receipt = read(project / "artifacts")
    assert receipt.stated["code"]["dirty"] and receipt.patch
    patch = receipt.patch.read_text()
    assert "WIDER = 1.25" in patch and "from .added import WIDER" in patch
    assert "nothing that a run reads" not in patch


@pytest.mark.long
def test_run_is_reproduced_on_two_ranks_and_the_work_tree_left_alone(project: Path):
    before = state(project)
    done = command(project, "replay", "artifacts/receipt.json", "--ranks", "2")
    assert done.returncode == 0, done.stderr + done.stdout
    weights = sha256_file(project / "artifacts" / names.WEIGHTS)
    assert done.stdout.startswith("library as released by template ")
    assert done.stdout.splitlines()[-1].startswith(f"REPRODUCED: weights {weights}, trace root ")
    assert sha256_file(project / "artifacts-replay" / names.WEIGHTS) == weights
    assert state(project) == before and not list((project / "build").glob("replay-*"))


@pytest.mark.long
def test_missing_data_comes_from_dvc_and_another_run_is_told(project: Path, tmp_path: Path, replay: Replay):
    """A receipt that states other weights; the data lie in a remote alone, which the user's own configuration names."""
    clone = Path(shutil.copytree(project, tmp_path / "clone"))
    raw = next((clone / "data" / "raw").glob("*.gz"))
    for words in (("add", raw), ("remote", "add", "--local", "--default", "kept", "../kept"), ("push",)):
        assert python("-m", "dvc", *words, "--quiet", cwd=clone).returncode == 0
    assert (tmp_path / "kept").is_dir() and not (clone / ".dvc" / "remote").exists()
    shutil.rmtree(clone / ".dvc" / "cache")
    raw.unlink()
    run = clone / "artifacts"
    statement = json.loads((run / names.RECEIPT).read_bytes())
    statement["subject"][0]["digest"]["sha256"] = "0" * 64
    statement["predicate"]["trace"] = "0" * 48
    write(run, statement)
    done = replay(clone, run / names.RECEIPT)
    assert done.exit_code == 1, done.output
    assert "missing or other data here; asking DVC for it" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"DIFFERS: weights {'0' * 64} there, ")


def write(run: Path, statement: Any) -> None:
    (run / names.RECEIPT).write_bytes(rfc8785.dumps(statement))


@pytest.mark.long
def test_lost_data_is_refused_with_the_hash_wanted(project: Path, tmp_path: Path, replay: Replay):
    clone = Path(shutil.copytree(project, tmp_path / "clone"))
    next((clone / "data" / "raw").glob("*.gz")).unlink()
    done = replay(clone)
    wanted = read(clone / "artifacts").stated["config"]["data.sha256"]
    assert done.exit_code == 2 and f"missing; wanted SHA-256 {wanted}" in done.stderr
    assert not list((clone / "build").glob("replay-*"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [({"commit": None}, "made outside git"), ({"commit": "0" * 40}, "not in this repository; get it with: git fetch")],
)
def test_code_that_is_not_to_be_had_is_refused(
    code: dict[str, Any], reason: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    receipt = read(project / "artifacts")
    stated = receipt.stated | {"code": receipt.stated["code"] | code}
    monkeypatch.setattr(replay_module, "read", lambda path: replace(receipt, stated=stated))
    with pytest.raises(UserError, match=reason):
        replay_module.replay(project_in(project), project / "artifacts", tmp_path / "out", None, print, Trust())


def test_lost_patch_is_told(project: Path, tmp_path: Path, replay: Replay):
    shutil.copyfile(project / "artifacts" / names.RECEIPT, tmp_path / names.RECEIPT)
    done = replay(project, tmp_path / names.RECEIPT)
    assert done.exit_code == 1 and "the receipt is of uncommitted code" in done.stderr


# ---- what others wrote


@pytest.fixture(scope="module")
def elsewhere(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with a clean work tree: whose run in artifacts/ was of uncommitted code that it does not hold."""
    folder = Path(shutil.copytree(project, tmp_path_factory.mktemp("elsewhere") / "project"))
    git(folder, "checkout", "--", ".")
    git(folder, "clean", "--force", "--", "src")
    return folder


SHOWN = [f"  src/{PACKAGE}/added.py: +1 -0", f"  src/{PACKAGE}/model.py: +3 -0"]


def test_patch_that_nobody_answers_for_is_shown_and_not_run(elsewhere: Path, replay: Replay):
    """Where the user says so, it is run: test_bundle.py."""
    done = replay(elsewhere, "--out", "artifacts-refused")
    assert done.exit_code == 2 and not (elsewhere / "artifacts-refused").exists()
    assert done.stdout.splitlines()[-2:] == SHOWN and "not signed: " in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"artifacts/{names.PATCH}: ") and "--run-patch" in line and "--signers FILE" in line


def test_patch_is_run_where_a_trusted_key_signed_the_receipt(elsewhere: Path, tmp_path: Path):
    def trusting(signers: Path) -> list[str]:
        message: list[str] = []
        require_trusted(project_in(elsewhere), receipt.path, receipt.patch, Trust(signers), message.append)
        return message

    run = Path(shutil.copytree(elsewhere / "artifacts", tmp_path / "run"))
    receipt = read(run)
    for name in ("ada", "mallory"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
        (tmp_path / f"{name}.signers").write_text(f"{name} {(tmp_path / f'{name}.pub').read_text()}")
    with pytest.raises(UserError, match="a signature wanted"):
        trusting(tmp_path / "ada.signers")
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-n", "repro-receipt", "-f", tmp_path / "ada", run / names.RECEIPT]
    subprocess.run(sign, check=True)
    message = trusting(tmp_path / "ada.signers")
    assert message[0].endswith(": signed by ada") and message[1].splitlines()[1:] == SHOWN
    with pytest.raises(RunError, match="signed by a key that is not among"):
        trusting(tmp_path / "mallory.signers")


def test_committed_code_and_that_of_the_work_tree_need_no_word(project: Path, elsewhere: Path):
    message: list[str] = []
    receipt = read(project / "artifacts")
    require_trusted(project_in(project), receipt.path, receipt.patch, Trust(), message.append)
    require_trusted(project_in(elsewhere), receipt.path, None, Trust(), message.append)
    assert message == []


@pytest.mark.parametrize(("section", "key"), [("receipt", "key"), ("tracking", "uri"), ("record", "finished")])
def test_key_outside_the_content_address_is_not_taken_from_a_receipt(
    section: str, key: str, project: Path, tmp_path: Path, replay: Replay
):
    statement = json.loads((project / "artifacts" / names.RECEIPT).read_bytes())
    stated = statement["predicate"]
    stated["preimage"]["config"][section] = {key: "of another"}
    stated["config"][f"{section}.{key}"] = "of another"
    stated["parts"] = {name: digest(part) for name, part in stated["preimage"].items()}
    stated["address"] = digest(stated["preimage"])
    write(tmp_path, statement)
    shutil.copyfile(project / "artifacts" / names.PATCH, tmp_path / names.PATCH)
    done = replay(project, tmp_path, "--out", tmp_path / "refused")
    assert done.exit_code == 2 and f"differ in the key '{section}.{key}': no run of " in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "named", ["/etc/passwd", "", ".", "../secret", "data/../../secret", "--remote=x", "a\nb", "a\0b"]
)
def test_data_outside_the_project_are_those_of_params_yaml(named: str, project: Path, tmp_path: Path):
    ours, tree = project_in(project), project_in(tmp_path)
    wanted = read(project / "artifacts").stated["config"]["data.sha256"]
    config = {"data.raw": named}
    assert sha256_file(replay_module._raw(ours, config, wanted, tree, print)) == wanted
    with pytest.raises(UserError, match="nothing in this project"):
        replay_module._raw(ours, config, "0" * 64, tree, print)


@pytest.mark.parametrize("commit", ["--detach", "HEAD", "0" * 39, "0" * 40 + "\n"])
def test_commit_that_is_no_commit_is_refused(commit: str, project: Path, tmp_path: Path, replay: Replay):
    statement = json.loads((project / "artifacts" / names.RECEIPT).read_bytes())
    statement["predicate"]["code"]["commit"] = commit
    write(tmp_path, statement)
    done = replay(project, tmp_path)
    assert done.exit_code == 2 and "code.commit: " in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["0" * 31, "0" * 33, "../" + "0" * 32, "-" + "0" * 31, "0" * 32 + "\n", "0" * 31 + "'"]
)
def test_name_that_is_no_id_asks_no_server(name: str):
    def server() -> str:
        raise AssertionError("it was asked")

    with (
        pytest.raises(UserError, match="no such run directory, receipt or MLflow run id"),
        sources.located(name, server),
    ):
        raise AssertionError("it was found")


def test_prepared_data_that_differ_are_named():
    """The record is of a folder in which an older preparation's file was left."""
    files = [{"path": name, "size": 1, "sha256": name * 64} for name in "abc"]
    here = {"requested": {}, "files": files[:2]}
    replay_module._require_same_data(here, here)
    with pytest.raises(RunError) as failure:
        replay_module._require_same_data(here | {"files": files}, here)
    said = f"files.c: {'c' * 64} recorded, None prepared here"
    assert str(failure.value) == f"other prepared data than those of the record: {said}"


# ---- verdicts


def outcome(weights: str, name: str = CLASS, accuracy: float | str = 0.99, trace: str | None = "t") -> Receipt:
    metrics = {"accuracy": accuracy, "test_loss": 0.05}
    stated = {"environment": {"class": name}, "metrics": metrics, "trace": trace}
    return Receipt("name", Path("nowhere", names.RECEIPT), weights, stated)


OTHER, RELAXED = "cuda/0123456789abcdef", "relaxed/0123456789abcdef"
ONE, UNTRACED = outcome("w"), outcome("w", trace=None)
METRICS_DIFFER = "METRICS DIFFER: accuracy 0.5000 (expected 0.9900 +- 0.02)"
OTHER_METRICS = "weights w as there, but other metrics: accuracy: 0.99 there, 0.9999 here"
UNLIKE = f"ENVIRONMENT DIFFERS: {CLASS} there, {OTHER} here; equal bits are not guaranteed. "
VERDICTS = [  # a run, what it was when it was made again, whether that holds, and what is said
    (ONE, outcome("w"), True, "REPRODUCED: weights w, trace root t"),
    (ONE, outcome("w", OTHER), True, "REPRODUCED: weights w, trace root t"),
    (ONE, outcome("w", accuracy=0.9999), False, OTHER_METRICS),
    (ONE, outcome("w", OTHER, accuracy=0.9999), True, "ENVIRONMENT DIFFERS: "),
    (ONE, outcome("w", OTHER, accuracy=0.5), False, METRICS_DIFFER),
    (ONE, outcome("w", trace="u"), False, "DIFFERS: weights w there, w here; trace root t there, u here"),
    (ONE, outcome("v"), False, "DIFFERS: weights w there, v here"),
    (ONE, outcome("v", OTHER), True, UNLIKE),
    (ONE, outcome("v", OTHER, accuracy=0.5), False, METRICS_DIFFER),
    (UNTRACED, UNTRACED, True, "REPRODUCED: weights w"),
    (outcome("w", accuracy="nan"), outcome("w", accuracy=float("nan")), True, "REPRODUCED: "),
    (outcome("v", RELAXED), outcome("w", RELAXED), True, "NOT COMPARABLE: class relaxed/"),
    (outcome("v", RELAXED), outcome("w", RELAXED), True, "metrics within tolerance"),
]


@pytest.mark.parametrize(("run", "again", "holds", "words"), VERDICTS)
def test_verdict(run: Receipt, again: Receipt, holds: bool, words: str):
    message: list[str] = []
    assert replay_module._compare(OURS, run, again, Path("nowhere"), message.append) is holds
    assert words in message[-1] and (run.stated["trace"] or message == [words])


def test_environment_variables_of_the_replay_are_its_own(project: Path):
    """A contradiction is refused where the run is made, before it computes anything."""
    env = {"PYTHONPATH": f"{project}/src:{project}/vendor", "MKL_CBWR": "AVX2"}
    done = python("-m", "samebits", "replay", "--ranks", "1", cwd=project, env=env)
    assert done.returncode == 1 and "MKL_CBWR" in done.stderr and os.environ["MKL_CBWR"] != "AVX2"
