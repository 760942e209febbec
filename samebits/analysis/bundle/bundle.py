"""`samebits bundle`: what a paper's artifact track asks for of runs, in one archive that `samebits replay` takes."""

import hashlib
import json
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...address.locks import LOCKS, pins_in
from ...address.manifest import sha256_file
from ...base.git import git, git_text
from ...base.project import Project
from ...core.errors import RunError, UserError
from ...record import names
from ...record.receipt import Receipt, read
from ...record.view import is_stated, stated_files
from .. import archive
from . import appendix, croissant

# Of a run: what its receipt speaks of, except for the weights, which may be large.
OF_A_RUN = (
    names.RECEIPT,
    names.SIGNATURE,
    names.PATCH,
    names.ADDRESS,
    names.ENVIRONMENT,
    names.RUN,
    names.METRICS,
    names.METRIC_ROWS,
    names.STEP_ROWS,
)
CITATION = "CITATION.cff"


@dataclass(frozen=True)
class About:
    """What the project says of itself."""

    name: str
    version: str
    description: str
    authors: list[str]
    license: str
    url: str
    commit: str
    date: str  # of the commit

    @property
    def cite(self) -> str:
        """In words, for those who cite it."""
        return f"{', '.join(self.authors) or self.name}: {self.name} {self.version}, commit {self.commit}, {self.date}"


def bundled(project: Project, runs: Sequence[Path], report: str, with_weights: bool) -> bytes:
    """The archive. `report` is the page of `samebits report` on the runs.

    Raises:
        UserError: a run is not finished, its files are not those of its receipt, it was made outside git, or the runs
            are of two commits.
        RunError: a receipt was altered, or its locks cannot be had.
    """
    receipts = [_sound(run, with_weights) for run in runs]
    states = {(str(each.stated["code"]["commit"]), each.stated["parts"]["lock"]) for each in receipts}
    if len(states) > 1:
        raise UserError(f"runs of {len(states)} commits or locks seen, of one wanted: bundle them one by one")
    ((commit, _),) = states
    about = _about(project, commit)
    files: dict[str, bytes | Path] = {
        "report.html": report.encode(),
        "APPENDIX.md": appendix.text(about, receipts, with_weights).encode(),
        CITATION: _citation(project, about),
        **_locks(project, receipts, commit),
    }
    kept = (*OF_A_RUN, names.WEIGHTS) if with_weights else OF_A_RUN
    for number, (run, receipt) in enumerate(zip(runs, receipts, strict=True), 1):
        files |= {f"{archive.RUNS}/{number}/{name}": run / name for name in kept if (run / name).is_file()}
        folder = (project.root / str(receipt.stated["config"]["data.raw"])).is_dir()
        held = croissant.described(receipt, about, folder)
        files[f"{archive.RUNS}/{number}/croissant.json"] = (json.dumps(held, indent=2) + "\n").encode()
    sums = "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files))
    return archive.packed(f"{about.name}-{receipts[0].name[:12]}", {**files, "SHA256SUMS": sums.encode()})


def _sha256(content: bytes | Path) -> str:
    return sha256_file(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def _sound(run: Path, with_weights: bool) -> Receipt:
    """The receipt of a run whose files are those that it states."""
    if not run.is_dir():
        raise UserError(f"{run}: no run directory; a finished run is bundled with its records")
    receipt = read(run)
    _ = receipt.patch  # it is the one that the receipt names
    wanted = [name for name in stated_files(receipt) if with_weights or name != names.WEIGHTS]
    if others := [name for name in wanted if not is_stated(receipt, name)]:
        raise UserError(f"{run / others[0]}: not as {names.RECEIPT} beside it states: altered or lost. Train again")
    if not receipt.stated["code"]["commit"]:
        raise UserError(
            f"{run}: made outside git, so that nobody could make it again; commit the project and train again"
        )
    return receipt


def _about(project: Project, commit: str) -> About:
    """From pyproject.toml and git, as they were at the commit."""
    stated = tomllib.loads(_shown(project, commit, "pyproject.toml").decode())["project"]
    authors = [str(each.get("name") or each.get("email")) for each in stated.get("authors", [])]
    date = git_text(project.root, "show", "--no-patch", "--format=%cs", commit)
    url = str(stated.get("urls", {}).get("Repository", "")) or f"urn:git:{commit}"
    given = stated.get("license", "")
    terms = given if isinstance(given, str) else str(given.get("text", ""))
    name, version, description = (str(stated.get(key, "")) for key in ("name", "version", "description"))
    return About(name, version, description, authors, terms, url, commit, date)


def _citation(project: Project, about: About) -> bytes:
    """The project's own citation file, or one made from what it says of itself (CFF 1.2.0)."""
    if own := _tracked(project, about.commit, CITATION):
        return own[0]
    facts: dict[str, Any] = {
        "cff-version": "1.2.0",
        "message": "If you use this software, please cite it as below.",
        "type": "software",
        "title": about.name,
        "authors": [{"name": name} for name in about.authors or [f"the authors of {about.name}"]],
        "version": about.version,
        "commit": about.commit,
        "date-released": about.date,
        **({"license": about.license} if about.license else {}),
    }
    return (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode()  # JSON is YAML


def _locks(project: Project, receipts: Sequence[Receipt], commit: str) -> dict[str, bytes]:
    """The locks that the runs had, as their content addresses name them: those of the commit, or of the work tree."""
    found: dict[str, bytes] = {}
    wanted = {pair for receipt in receipts for pair in receipt.stated["preimage"]["lock"].items()}
    listed = git(project.root, "ls-tree", "-z", "--name-only", commit, f"./{LOCKS}/").decode().split("\0")
    for path in (path for path in listed if path.endswith(".txt")):
        here = project.root / path
        seen = [*_tracked(project, commit, path), *([here.read_bytes()] if here.is_file() else [])]
        held = [content for content in seen if _fits(content, wanted)]
        if not held:
            raise RunError(f"{path}: neither commit {commit} nor the work tree has it as the run had it")
        found[path] = held[0]
    return found


def _fits(lock: bytes, wanted: set[tuple[str, str]]) -> bool:
    """Whether a lock pins nothing in another version than these; of torch, builds count as one."""
    pins = pins_in(lock.decode(errors="replace"))
    return all(pins.get(name, version).partition("+")[0] == version.partition("+")[0] for name, version in wanted)


def _tracked(project: Project, commit: str, name: str) -> list[bytes]:
    """The content of a file at a commit; nothing where the commit lacks it."""
    with suppress(RunError):
        return [_shown(project, commit, name)]
    return []


def _shown(project: Project, commit: str, name: str) -> bytes:
    return git(project.root, "show", f"{commit}:./{name}")
