"""The two sides of a bisect as they are named: by words, by two commits, or by two recorded runs."""

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...address import manifest, pull
from ...address.address import address_differences, content_address
from ...base.project import Project
from ...base.shape import plain
from ...base.text import flatten, named
from ...config.params import load
from ...config.settings import Settings
from ...core.errors import RunError, UserError
from ...core.flags import FLAGS, applicable
from ...core.options import Determinism
from ...record.names import TRACE
from ...record.receipt import Receipt, read
from ..replay import ENVIRONMENT_KEYS, lacking, start_of
from ..series import Made, Requested, Series
from ..sources import located
from ..verify import shortened
from .commits import PLACES, Clone, cloned, resolve
from .suspects import CPU, OWN, RELAX, Setup, Side, Words, is_own, side, split

FOLDER = Path("build", "bisect")
USAGE = "name two recorded runs, or --a KEY=VALUE and --b KEY=VALUE, or --commits GOOD BAD"


class Here:
    """Trainings of the project as it stands; one that was made before is found again."""

    def __init__(self, project: Project, schema: type[Settings]) -> None:
        self._series, self._base = Series(project, schema, FOLDER), load(schema).flat()

    def make(self, setup: Setup, number: int) -> Made:
        """Train here."""
        settings = {key: value for key, value in setup.config.items() if key in OWN or self._base.get(key) != value}
        return self._series.one(Requested("bisect", settings, setup.ranks, setup.variables, number))


@dataclass(frozen=True)
class Question:
    """What a bisect is asked.

    Attributes:
        recorded: the receipts of A and B, whose bits must come again.
        files: of the package, that differ between the commits of A and B.
    """

    a: Side
    b: Side
    recorded: Mapping[str, Receipt] = field(default_factory=dict)
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Named:
    """What the command line names."""

    runs: Sequence[str]
    a: Sequence[str]
    b: Sequence[str]
    common: Sequence[str]
    commits: tuple[str, str] | None
    long: bool


@contextmanager
def requested(
    project: Project, schema: type[Settings], words: Named, uri: Callable[[], str]
) -> Iterator[tuple[Here | Clone, Question]]:
    """Who makes the trainings, and the question to it.

    Raises:
        UserError: what is named cannot be had, or another bisect works here.
    """
    if len(words.runs) not in (0, 2) or bool(words.runs) == bool(words.a or words.b or words.commits):
        raise UserError(f"{len(words.runs)} runs, {len(words.a)} --a and {len(words.b)} --b seen; {USAGE}")
    with ExitStack() as stack:
        stack.enter_context(_alone(project))
        if words.runs:
            paths = [stack.enter_context(located(run, uri)) for run in words.runs]
            yield _of_runs(project, schema, words, paths, stack)
        elif words.commits:
            yield _of_commits(project, schema, words, stack)
        else:
            a, b = (_side(schema, split((*words.common, *own)), words.long) for own in (words.a, words.b))
            yield Here(project, schema), Question(a, b)


@contextmanager
def _alone(project: Project) -> Iterator[None]:
    path = project.root / FOLDER / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path.parent}: another bisect works there; wait for its end") from None
        yield


def _side(schema: type[Settings], words: Words, long: bool) -> Side:
    config = load(schema, overrides=words.overrides) if long else shortened(schema, words.overrides)[0]
    return side(config, words.ranks, words.variables)


def _places(project: Project, config: Settings) -> dict[str, Any]:
    """Where the user has the data, from the root of the file system: a clone lies elsewhere."""
    raw = project.root / config.data.raw
    if not raw.exists():
        pull.bring(raw, project.root)  # if it cannot, a commit's own stage says so
    return {key: str((project.root / config.flat()[key]).resolve()) for key in PLACES}


def _of_commits(
    project: Project, schema: type[Settings], words: Named, stack: ExitStack
) -> tuple[Here | Clone, Question]:
    assert words.commits
    good, bad = (resolve(project, name) for name in words.commits)
    if good == bad:
        raise UserError(f"--commits {plain(' '.join(words.commits))}: both are commit {good[:12]}; name two")
    here = load(schema)
    shorten = () if words.long else here.verify.shorten
    clone, sides = stack.enter_context(cloned(project, project.root / FOLDER, _places(project, here))), []
    for commit, own in ((good, words.a), (bad, words.b)):
        given = split((*words.common, *own))
        clone.check_out(commit)
        sides.append(clone.side((*shorten, *given.overrides), given.ranks, given.variables))
    return clone, Question(sides[0], sides[1], files=clone.differing(good, bad))


def _of_runs(
    project: Project, schema: type[Settings], words: Named, paths: Sequence[Path], stack: ExitStack
) -> tuple[Here | Clone, Question]:
    receipts = [read(path) for path in paths]
    for name, receipt in zip(words.runs, receipts, strict=True):
        if absent := lacking(receipt.stated["config"]):
            raise UserError(f"{plain(name)}: its config has no key {absent[0]}: no run wrote it")
    datas = [each.stated["parts"]["data"] for each in receipts]
    if datas[0] != datas[1]:
        raise UserError(
            f"{plain(' and '.join(words.runs))}: trained on other data, which cannot be exchanged one by one. Prepare "
            f"both and name the folders: --a data.prepared=FOLDER --b data.prepared=FOLDER"
        )
    recorded = dict(zip("AB", receipts, strict=True))
    texts = [[*_texts(project, receipt), *words.common] for receipt in receipts]
    ranks = [_ranks(path, receipt) for path, receipt in zip(paths, receipts, strict=True)]
    given = [*zip(words.runs, receipts, texts, ranks, strict=True)]
    other = next(filter(None, (_other(project, schema, run, text) for _, run, text, _ in given)), None)
    if not other:
        a, b = (side(load(schema, overrides=text), size, _variables(run)) for _, run, text, size in given)
        return Here(project, schema), Question(a, b, recorded)
    for name, receipt in zip(words.runs, receipts, strict=True):
        code = receipt.stated["code"]
        if not code["commit"] or code["patch"]:
            raise UserError(
                f"{plain(name)}: not what the project would make ({other}), and its code is in no commit. Restore "
                f"what it was made from, or make the run again from a commit"
            )
        resolve(project, code["commit"])
    places = _places(project, load(schema))
    clone, sides = stack.enter_context(cloned(project, project.root / FOLDER, places)), []
    for name, receipt, text, size in given:
        clone.check_out(receipt.stated["code"]["commit"])
        found = clone.side(text, size, _variables(receipt))
        _require_keys(name, receipt, found)
        sides.append(found)
    a, b = sides
    return clone, Question(a, b, recorded, clone.differing(a.commit or "", b.commit or ""))


def _other(project: Project, schema: type[Settings], receipt: Receipt, overrides: Sequence[str]) -> str | None:
    """Return the first field in which the project as it stands would make another run; None if there is none."""
    try:
        config = load(schema, overrides=overrides)
        address = content_address(project, config, manifest.require_prepared(config.data))
    except RunError as failure:
        return plain(str(failure))
    differing = address_differences(receipt.stated, address.record())
    return plain(named(differing[:1], "there", "here")) if differing else None


def _texts(project: Project, receipt: Receipt) -> list[str]:
    """Overrides from the config of a record, which others may have written.

    Where something lies is not taken from it, but for the weights from which the run started, whose digest is known;
    and of a neutral key only a number or a truth.

    Raises:
        UserError: those weights are not there.
    """
    stated = receipt.stated
    addressed = flatten(stated["preimage"]["config"]).keys() | {"seed", *ENVIRONMENT_KEYS}
    config = stated["config"]
    kept = {key: value for key, value in config.items() if key in addressed or isinstance(value, int | float)}
    kept = {key: value for key, value in kept.items() if not is_own(key) and key not in PLACES}
    return [f"{key}={json.dumps(value)}" for key, value in {**kept, **start_of(project, stated)}.items()]


def _ranks(path: Path, receipt: Receipt) -> int:
    """Its world size: as the address has it, or by the rows of its ranks; 1 where nobody knows."""
    stated = receipt.stated["preimage"].get("world_size")
    return stated or (len(list(path.glob(f"{TRACE}/rank*.jsonl"))) if path.is_dir() else 0) or 1


def _variables(receipt: Receipt) -> Mapping[str, str]:
    """The variables of flags that the run left off; no other is taken from a record."""
    stated = receipt.stated
    config = stated["config"]
    held = {flag.name for flag in applicable(Determinism(cpu=config[CPU], relax=tuple(config[RELAX])))}
    names = {flag.name for flag in FLAGS if flag.setting} - held
    found = stated["environment"]["preimage"].get("variables", {})
    return {
        name: value for name, value in found.items() if name in names and isinstance(value, str) and value.isprintable()
    }


def _require_keys(name: str, receipt: Receipt, found: Side) -> None:
    """Refuse a record that names other keys than the content address of its commit's code has."""
    named_there = flatten(receipt.stated["preimage"]["config"]).keys() - {*PLACES}
    known = found.config.keys() - found.neutral - {"seed", *ENVIRONMENT_KEYS}
    if strange := sorted(named_there ^ known):
        raise UserError(
            f"{plain(name)}: its config and the content address of its commit's code differ in the key {strange[0]!r}: "
            f"no run of that code wrote it"
        )
