"""A recorded run made again: its commit in a worktree of its own, its data and its config; then both compared."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import manifest
from ..address import PROJECT, digest
from ..errors import Failure, Refused
from ..preflight import differences, flatten
from ..trace import FOLDER
from . import diff, launched, receipts, results

Tell = Callable[[str], None]
ENVIRONMENT_KEYS = ("device", "determinism.cpu", "determinism.relax")


def replay(source: Path, out: Path, ranks: int | None, tell: Tell) -> bool:
    """Make the run of a receipt (or of the run directory with it) again in `out`; say whether it is reproduced.

    Raises:
        Refused: its commit or its data are not to be had here, or `ranks` is not the world size in its address.
        Failure: a step of it failed.
    """
    receipt = receipts.read(source)
    stated = receipt.stated
    promised = stated["preimage"].get("world_size")
    if promised and ranks not in (None, promised):
        raise Refused(f"world size {ranks} asked for, {promised} wanted: with parallel.reduce=ddp it decides bits")
    with remade(receipt.name, stated, receipt.patch, tell) as (project, package, keys):
        here = json.loads(launched.run(launched.command("", keys, "env", package=package), project))
        for field in differences(stated["environment"]["preimage"], here["preimage"]):
            tell(f"environment: {field.field}: {field.one} there, {field.other} here")
        size = promised or ranks or 1
        tell(f"training on {size} rank{'s' * (size > 1)} into {out}")
        keys |= {"tracking.enabled": False, "trace.level": "step" if stated["trace"] else "off"}
        words = launched.command(".train", keys, "--out", out.absolute(), ranks=size, package=package)
        launched.run(words, project)
    again = receipts.read(out)
    asked = differences(stated["preimage"], again.stated["preimage"])
    if asked:
        raise Failure(f"another content address: {asked[0].field}: {asked[0].one} there, {asked[0].other} here")
    return _compare(receipt, again, source, tell)


@contextmanager
def remade(
    name: str, run: Mapping[str, Any], patch: Path | None, tell: Tell
) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """What a run had, in a worktree that is gone afterwards: the project, its package, the keys that may change bits.

    `run` holds its `code`, `config`, `preimage` and `parts`. The user's own work tree is left alone.

    Raises:
        Refused: its commit or its data are not to be had.
    """
    with _checked_out(name, run["code"], patch) as project:
        (package,) = (path.parent.name for path in (project / "src").glob("*/repro"))
        preimage, config = run["preimage"], run["config"]
        keys = flatten(preimage["config"]) | {"seed": preimage["seed"]} | {key: config[key] for key in ENVIRONMENT_KEYS}
        keys |= {"data.raw": str(_raw(config, project, tell)), "data.prepared": str(project / "data" / "prepared")}
        launched.run(launched.command(".prepare", keys, package=package), project)
        seen, wanted = digest(manifest.verify(Path(keys["data.prepared"]))), run["parts"]["data"]
        if seen != wanted:
            raise Failure(f"data: manifest root {seen} prepared here, {wanted} recorded")
        yield project, package, keys


@contextmanager
def _checked_out(name: str, code: Mapping[str, Any], patch: Path | None) -> Iterator[Path]:
    commit = code["commit"]
    if not commit:
        raise Refused(f"run {name[:12]}: made outside git, so that nobody knows its code")
    if _git("cat-file", "-e", f"{commit}^{{commit}}", check=False).returncode:
        raise Refused(f"commit {commit}: not in this repository; get it with: git fetch, and run this again")
    tree = PROJECT / "build" / f"replay-{name[:12]}"
    try:
        _remove(tree)  # left by one that was killed
        _git("-c", "core.hooksPath=/dev/null", "worktree", "add", "--quiet", "--detach", str(tree), commit)
        if patch:
            _git("apply", "--whitespace=nowarn", str(patch.absolute()), cwd=tree)
        yield tree / _git("rev-parse", "--show-prefix").stdout.strip()
    finally:
        _remove(tree)


def _remove(tree: Path) -> None:
    _git("worktree", "remove", "--force", str(tree), check=False)
    shutil.rmtree(tree, ignore_errors=True)
    _git("worktree", "prune", check=False)


def _git(*words: str, cwd: Path | None = None, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(["git", *words], cwd=cwd or PROJECT, capture_output=True, text=True)
    if check and done.returncode:
        raise Failure(f"git {' '.join(words)}: {' '.join(done.stderr.split())}")
    return done


def _raw(config: Mapping[str, Any], project: Path, tell: Tell) -> Path:
    """The dataset file as the run had it: the user's, or in the worktree, from DVC."""
    named, wanted = config["data.raw"], config["data.sha256"]
    own, raw = PROJECT / named, project / named
    if own.is_file() and manifest.sha256_file(own) == wanted:
        return own
    tell(f"{named}: missing or other data here; asking DVC for it")
    for words in (
        ("config", "--local", "core.no_scm", "true"),
        ("cache", "dir", "--local", str(PROJECT / ".dvc" / "cache")),
        ("pull", "--quiet", f"{named}.dvc"),
    ):
        subprocess.run(["dvc", *words], cwd=project, capture_output=True)
    manifest.require(raw, wanted, "DVC has it neither in its cache nor in a remote; put it back, then replay again")
    return raw


def _compare(receipt: receipts.Receipt, again: receipts.Receipt, source: Path, tell: Tell) -> bool:
    there, here = receipt.stated, again.stated
    classes = there["environment"]["class"], here["environment"]["class"]
    if receipt.weights == again.weights and there["trace"] in (None, here["trace"]):
        root = f", trace root {there['trace']}" if there["trace"] else ""
        tell(f"REPRODUCED: weights {again.weights}{root}")
        return True
    if classes[0] != classes[1]:
        holds, shown = results.within_tolerance(here["metrics"], there["metrics"])
        verdict = "metrics within tolerance" if holds else "METRICS DIFFER"
        tell(f"ENVIRONMENT DIFFERS: {classes[0]} there, {classes[1]} here; bits are not promised. {verdict}: {shown}")
        return holds
    if source.is_dir() and (source / FOLDER).is_dir() and (again.path.parent / FOLDER).is_dir():
        equal, lines = diff.report(diff.load(source), diff.load(again.path.parent))
        if not equal:
            tell("\n".join(["DIFFERS", *lines]))
            return False
    roots = f"trace root {there['trace']} there, {here['trace']} here"
    tell(f"DIFFERS: weights {receipt.weights} there, {again.weights} here; {roots}")
    return False
