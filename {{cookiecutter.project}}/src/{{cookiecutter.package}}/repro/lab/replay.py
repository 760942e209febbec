"""Making of a recorded run again, from its commit, its data and its config, and the comparison of both."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..asked import manifest
from ..asked.address import digest
from ..differences import differences, flatten
from ..errors import Failure, Refused
from ..project import Project
from ..records.machinery import judged
from ..records.names import TRACE
from ..records.receipt import Receipt, read
from . import diff, results, trainings

Tell = Callable[[str], None]
ENVIRONMENT_KEYS = ("device", "determinism.cpu", "determinism.relax")


def replay(project: Project, source: Path, out: Path, ranks: int | None, tell: Tell) -> bool:
    """Make the run of a receipt (or of the run directory with it) again in `out`; say whether it is reproduced.

    Raises:
        Refused: its commit or its data cannot be had here, or `ranks` is not the world size in its address.
        Failure: a step of it failed.
    """
    receipt = read(source)
    stated = receipt.stated
    promised = stated["preimage"].get("world_size")
    if promised and ranks not in (None, promised):
        raise Refused(f"world size {ranks} asked for, {promised} wanted: with parallel.reduce=ddp it decides bits")
    tell("\n".join(judged(project, stated.get("machinery"))))
    with remade(project, receipt.name, stated, receipt.patch, tell) as (tree, keys):
        here = json.loads(trainings.run(tree, trainings.command(tree, "", keys, "env")))
        for field in differences(stated["environment"]["preimage"], here["preimage"]):
            tell(f"environment: {field.field}: {field.one} there, {field.other} here")
        size = promised or ranks or 1
        tell(f"training on {size} rank{'s' * (size > 1)} into {out}")
        keys |= {"tracking.enabled": False, "trace.level": "step" if stated["trace"] else "off"}
        trainings.run(tree, trainings.command(tree, ".train", keys, "--out", out.absolute(), ranks=size))
    again = read(out)
    asked = differences(stated["preimage"], again.stated["preimage"])
    if asked:
        raise Failure(f"another content address: {asked[0].field}: {asked[0].one} there, {asked[0].other} here")
    return _compare(project, receipt, again, source, tell)


@contextmanager
def remade(
    project: Project, name: str, run: Mapping[str, Any], patch: Path | None, tell: Tell
) -> Iterator[tuple[Project, dict[str, Any]]]:
    """The project that a run had, in a worktree that is gone afterwards, and the keys that may change bits.

    `run` holds its `code`, `config`, `preimage` and `parts`. The user's own work tree is left alone.

    Raises:
        Refused: its commit or its data cannot be had.
    """
    with _checked_out(project, name, run["code"], patch) as tree:
        preimage, config = run["preimage"], run["config"]
        keys = flatten(preimage["config"]) | {"seed": preimage["seed"]} | {key: config[key] for key in ENVIRONMENT_KEYS}
        keys["data.raw"] = str(_raw(project, config, tree, tell))
        keys["data.prepared"] = str(tree.root / "data" / "prepared")
        trainings.run(tree, trainings.command(tree, ".prepare", keys))
        seen, wanted = digest(manifest.require_whole(Path(keys["data.prepared"]))), run["parts"]["data"]
        if seen != wanted:
            raise Failure(f"data: manifest root {seen} prepared here, {wanted} recorded")
        yield tree, keys


@contextmanager
def _checked_out(project: Project, name: str, code: Mapping[str, Any], patch: Path | None) -> Iterator[Project]:
    commit = code["commit"]
    if not commit:
        raise Refused(f"run {name[:12]}: made outside git, so that nobody knows its code")
    if _git(project.root, "cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode:
        raise Refused(f"commit {commit}: not in this repository; get it with: git fetch, and run this again")
    tree = project.root / "build" / f"replay-{name[:12]}"
    try:
        _remove(project, tree)  # left by one that was killed
        no_hooks = ("-c", "core.hooksPath=/dev/null")
        _git(project.root, *no_hooks, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        if patch:
            _git(tree, "apply", "--whitespace=nowarn", str(patch.absolute()))
        root = tree / _git(project.root, "rev-parse", "--show-prefix").stdout.strip()
        (machinery,) = (root / "src").glob("*/repro")
        yield Project(machinery.parent)
    finally:
        _remove(project, tree)


def _remove(project: Project, tree: Path) -> None:
    _git(project.root, "worktree", "remove", "--force", str(tree), check=False)
    shutil.rmtree(tree, ignore_errors=True)
    _git(project.root, "worktree", "prune", check=False)


def _git(folder: Path, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    if check and done.returncode:
        raise Failure(f"git {' '.join(words)}: {' '.join(done.stderr.split())}")
    return done


def _raw(project: Project, config: Mapping[str, Any], tree: Project, tell: Tell) -> Path:
    """The dataset file as the run had it: the user's, or in the worktree, from DVC."""
    named, wanted = config["data.raw"], config["data.sha256"]
    own, raw = project.root / named, tree.root / named
    if own.is_file() and manifest.sha256_file(own) == wanted:
        return own
    tell(f"{named}: missing or other data here; asking DVC for it")
    for words in (
        ("config", "--local", "core.no_scm", "true"),
        ("cache", "dir", "--local", str(project.root / ".dvc" / "cache")),
        ("pull", "--quiet", f"{named}.dvc"),
    ):
        subprocess.run(["dvc", *words], cwd=tree.root, capture_output=True)
    manifest.require(raw, wanted, "DVC has it neither in its cache nor in a remote; put it back, then replay again")
    return raw


def _compare(project: Project, receipt: Receipt, again: Receipt, source: Path, tell: Tell) -> bool:
    there, here = receipt.stated, again.stated
    classes = there["environment"]["class"], here["environment"]["class"]
    if receipt.weights == again.weights and there["trace"] in (None, here["trace"]):
        root = f", trace root {there['trace']}" if there["trace"] else ""
        tell(f"REPRODUCED: weights {again.weights}{root}")
        return True
    if classes[0] != classes[1]:
        holds, shown = results.within_tolerance(project, here["metrics"], there["metrics"])
        verdict = "metrics within tolerance" if holds else "METRICS DIFFER"
        tell(f"ENVIRONMENT DIFFERS: {classes[0]} there, {classes[1]} here; bits are not promised. {verdict}: {shown}")
        return holds
    if source.is_dir() and (source / TRACE).is_dir() and (again.path.parent / TRACE).is_dir():
        equal, lines = diff.report(diff.load(source), diff.load(again.path.parent))
        if not equal:
            tell("\n".join(["DIFFERS", *lines]))
            return False
    roots = f"trace root {there['trace']} there, {here['trace']} here"
    tell(f"DIFFERS: weights {receipt.weights} there, {again.weights} here; {roots}")
    return False
