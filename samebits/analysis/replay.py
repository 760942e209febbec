"""Making of a recorded run again, from its commit, its data and its config, and the comparison of both."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ..address import hashing, manifest, pull
from ..address.address import address_differences, code, core_stated
from ..address.judged import judged
from ..base.project import VENDORED, Project
from ..base.text import differences, flatten, some
from ..config.params import PARAMS
from ..config.settings import Start
from ..core.arithmetic import description
from ..core.errors import RunError, UserError
from ..record import started
from ..record.classes import promises
from ..record.names import RUN, TRACE
from ..record.receipt import Receipt, read
from ..record.view import LATER, other_metrics
from ..start import trainings
from . import diff, results
from .trust import Trust, require_trusted
from .workcopy import require_command, work_copy

Report = Callable[[str], None]
ENVIRONMENT_KEYS = ("device", "determinism.cpu", "determinism.tf32", "determinism.relax", "environment.variables")


def replay(project: Project, source: Path, out: Path, ranks: int | None, report: Report, trust: Trust) -> bool:
    """Make the run of a receipt (or of the run directory with it) again in `out`; say whether it is reproduced.

    Raises:
        UserError: its commit or its data cannot be had here, `ranks` is not the world size in its address, it brings
            code along that nobody allowed, or `out` is its own folder.
        RunError: a step of it failed.
    """
    _require_elsewhere(source, out)
    receipt = read(source)
    stated = receipt.stated
    portable = stated["preimage"].get("world_size")
    if portable and ranks not in (None, portable):
        raise UserError(
            f"world size: expected {portable}, got {ranks}. The receipt's content address states this world size, "
            f"because an earlier release summed the gradients by DistributedDataParallel. Leave out --ranks"
        )
    report("\n".join(judged(project, stated)))
    patch = receipt.patch
    require_trusted(project, receipt.path, patch, trust, report)
    with remade(project, receipt.name, stated, patch, report) as (tree, keys):
        here = json.loads(trainings.run(tree, trainings.command("env", keys)))
        for field in differences(stated["environment"]["preimage"], here["preimage"]):
            report(f"environment: {field.field}: {field.one} there, {field.other} here")
        size = portable or ranks or 1
        report(f"training on {size} rank{'s' * (size > 1)} into {out}")
        keys |= {"tracking.enabled": False, "trace.level": "step" if stated["trace"] else "off"}
        keys["receipt.key"] = ""  # the reader's key is none of the record's business
        trainings.run(tree, trainings.command("train", keys, "--out", out.absolute(), ranks=size))
    again = read(out)
    if requested := address_differences(stated, again.stated):
        raise RunError(
            f"another content address: {requested[0].field}: {requested[0].one} there, {requested[0].other} here"
        )
    return _compare(project, receipt, again, source, report)


def _require_elsewhere(source: Path, out: Path) -> None:
    """Refuse to make a run in the folder of the one that it is compared with, by whatever name, or around it."""
    here, there = out.resolve(), (source if source.is_dir() else source.parent).resolve()
    nested = (there / RUN).is_file() and (there in here.parents or here in there.parents)
    if nested or here == there:
        raise UserError(
            f"--out {out}: the run that is compared with, or a folder in or above it, another place wanted: choose one "
            f"with --out"
        )


@contextmanager
def remade(
    project: Project, name: str, run: Mapping[str, Any], patch: Path | None, report: Report
) -> Iterator[tuple[Project, dict[str, Any]]]:
    """The project that a run had, in a worktree that is gone afterwards, and the keys that may change bits.

    `run` holds its `code`, `config`, `preimage` and `parts`, in the form `Made`. The library is that of its commit.
    The user's own work tree is left alone.

    Raises:
        UserError: its commit or its data cannot be had, or its config names a key that is not in the content address.
    """
    commit = run["code"]["commit"]
    if not commit:
        raise UserError(f"run {name[:12]}: made outside git, so that nobody knows its code")
    folder = project.root / "build" / f"replay-{name[:12]}"
    with work_copy(project, folder, "which has the code of the run; run this in a clone", commit) as copy:
        if patch:
            copy.git("apply", "--whitespace=nowarn", str(patch.absolute()))
        tree = _with_library(project, copy.root, run)
        keys = _keys(tree, run) | start_of(project, run)
        keys["data.raw"] = str(_raw(project, run["config"], keys["data.sha256"], tree, report))
        keys["data.prepared"] = str(tree.root / "data" / "prepared")
        trainings.run(tree, trainings.command("prepare", keys))
        _require_same_data(run["preimage"]["data"], manifest.require_complete(Path(keys["data.prepared"])))
        yield tree, keys


def _require_same_data(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse prepared data whose manifest is not the recorded one, by the files that differ."""
    if there != here:
        named = [{**data, "files": {each["path"]: each["sha256"] for each in data["files"]}} for data in (there, here)]
        found = [f"{d.field}: {d.one} recorded, {d.other} prepared here" for d in differences(*named)]
        raise RunError(f"other prepared data than those of the record: {some(found)}")


def _keys(tree: Project, run: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run that may change bits. No other is taken from a record: others may have written it."""
    preimage, config = run["preimage"], run["config"]
    keys = flatten(preimage["config"])
    known = flatten(trainings.config_of(tree)["addressed"])
    strange = sorted(keys.keys() ^ known.keys()) + lacking(config)
    if strange:
        raise UserError(
            f"the config in the record and the content address of its code differ in the key {strange[0]!r}: no run of "
            f"that code wrote the record; ask for the whole one"
        )
    return keys | {"seed": preimage["seed"]} | {key: config[key] for key in ENVIRONMENT_KEYS if key in config}


def lacking(config: Mapping[str, Any]) -> list[str]:
    """The keys of the environment that the config of a record has to hold, and does not."""
    return [key for key in ENVIRONMENT_KEYS if key not in config and key not in LATER]


def start_of(project: Project, run: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run that started from another one, whose weights are to lie in this project or where it had them.

    Raises:
        UserError: they are not there.
    """
    if not (held := run["preimage"].get("start")):
        return {}
    named = str(run["config"].get("start.run"))
    if not named.isprintable():
        raise UserError(f"the record names {named!r} as the run from which this one started: no run wrote that")
    start = Start(run=str(project.root / named), **held)
    started.require(start)
    return {f"start.{name}": value for name, value in start.model_dump().items()}


def _with_library(project: Project, root: Path, run: Mapping[str, Any]) -> Project:
    """Return the project in a worktree with the library of that commit, or else with this one if its core fits.

    Raises:
        UserError: the commit has no copy of the library, and this project's core would give another content address;
            or as `require_command`.
    """
    require_command(root, run["code"]["commit"])
    if (root / VENDORED).is_dir():
        return Project.at(root)
    expected, actual = run["preimage"].get("core", {}), core_stated(project, code(project))
    if expected != actual:
        release = run.get("library", {}).get("template", "unknown")
        raise UserError(
            f"commit {run['code']['commit'][:12]} holds no copy of the library. Core: expected "
            f"{description(expected)}, got {description(actual)}. Release {release} of the template can replay this run"
        )
    tree = Project(root / "src" / project.name)
    shutil.copytree(project.library, root / VENDORED)
    return tree


def _raw(project: Project, config: Mapping[str, Any], wanted: str, tree: Project, report: Report) -> Path:
    """The dataset, a file or a folder, as the run had it: the user's, or in the worktree, from DVC.

    A record names only what lies in the project; elsewhere, it must be what the user's params.yaml names.
    """
    named = str(config.get("data.raw"))
    parts = Path(named).parts
    if Path(named).is_absolute() or not parts or ".." in parts or named.startswith("-") or not named.isprintable():
        own = project.root / YAML(typ="safe").load((project.root / PARAMS).read_text())["data"]["raw"]
        remedy = f"The record names {named!r}, nothing in this project: write where yours lies into {PARAMS}: data.raw"
        manifest.require_sha256(own, wanted, remedy)
        return own
    own, raw = project.root / named, tree.root / named
    if manifest.digest(hashing.entries(own, {})) == wanted:
        return own
    report(f"{named}: missing or other data here; asking DVC for it")
    why = pull.bring(raw, tree.root, owner=project.root)
    manifest.require_sha256(
        raw, wanted, why or "DVC has other data than the record names; put them back, then replay again"
    )
    return raw


def _compare(project: Project, receipt: Receipt, again: Receipt, source: Path, report: Report) -> bool:
    there, here = receipt.stated, again.stated
    classes = there["environment"]["class"], here["environment"]["class"]
    measured = other_metrics(there["metrics"], here["metrics"], "there", "here")
    if (equal := receipt.weights == again.weights and there["trace"] in (None, here["trace"])) and not measured:
        root = f", trace root {there['trace']}" if there["trace"] else ""
        report(f"REPRODUCED: weights {again.weights}{root}")
        return True
    if classes[0] != classes[1] or not promises(classes[0]):
        holds, verdict = results.within_tolerance(project, here["metrics"], there["metrics"])
        same = f"NOT COMPARABLE: class {classes[0]} there and here, in which flags are off or environments mixed"
        said = same if classes[0] == classes[1] else f"ENVIRONMENT DIFFERS: {classes[0]} there, {classes[1]} here"
        report(f"{said}; equal bits are not guaranteed. {verdict}")
        return holds
    if equal:
        why = "the evaluation does not repeat, or the receipt was altered"
        report(f"DIFFERS: weights {again.weights} as there, but other metrics: {measured}: {why}")
        return False
    if source.is_dir() and (source / TRACE).is_dir() and (again.path.parent / TRACE).is_dir():
        equal, lines = diff.report(diff.load(source), diff.load(again.path.parent))
        if not equal:
            report("\n".join(["DIFFERS", *lines]))
            return False
    roots = f"trace root {there['trace']} there, {here['trace']} here"
    report(f"DIFFERS: weights {receipt.weights} there, {again.weights} here; {roots}")
    return False
