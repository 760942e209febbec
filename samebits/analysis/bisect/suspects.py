"""The two sides of a bisect, and the suspects: each thing in which they differ, to be exchanged one by one."""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.shape import plain, shown
from ...base.text import flatten
from ...config.settings import Settings
from ...core.errors import UserError
from ...core.flags import FLAGS, applicable, is_portable, missing_variables
from ...core.options import Determinism
from ...record.started import ADDRESSED
from ..series import ALONE

RANKS, THREADS, VARIABLE = "ranks", "threads", "env."
START = "start"  # its keys are one suspect: half of them start no run
THREADS_OF = "OMP_NUM_THREADS"  # the variable that `threads` means
CPU, RELAX = "determinism.cpu", "determinism.relax"
# What a bisect sets itself: nothing is kept but what is compared.
OWN: Mapping[str, Any] = {**ALONE, "trace.level": "tensor", "trace.values": -1}
OWN_SECTIONS = ("tracking.", "verify.")
WHY_NEUTRAL = "it is neutral and must change no bit: the code that reads it is at fault"
WHY_RANKS = "the result must be identical for each world size: the code is at fault"


class Kind(enum.Enum):
    """The sort of a suspect."""

    KEY, START, FLAG, RANKS, VARIABLE, FILE = "key", "start", "flag", "ranks", "variable", "file"


@dataclass(frozen=True)
class Side:
    """A or B, as it is asked for: every key of params.yaml, the world size, variables, the commit if it matters."""

    config: Mapping[str, Any]
    neutral: frozenset[str] = frozenset()
    ranks: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None

    @property
    def determinism(self) -> Determinism:
        """Which flags hold."""
        return Determinism(cpu=self.config[CPU], relax=tuple(self.config[RELAX]))

    @property
    def relaxed(self) -> set[str]:
        """The flags that are left off, by name."""
        names = set(self.config[RELAX])
        return {flag.name for flag in FLAGS if {"all", flag.name} & names}


@dataclass(frozen=True)
class Suspect:
    """Something in which A and B differ. `name` is for display; `key` names the key, flag, variable or file."""

    name: str
    kind: Kind
    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Setup:
    """What a trial trains with."""

    config: Mapping[str, Any]
    ranks: int
    variables: Mapping[str, str]
    files: frozenset[str] = frozenset()  # those that are as in the commit `of`, not as in `commit`
    commit: str | None = None
    of: str | None = None


@dataclass(frozen=True)
class Words:
    """The parsed arguments of one side: overrides of keys, and the other arguments."""

    overrides: tuple[str, ...]
    ranks: int
    variables: Mapping[str, str]


def split(words: Iterable[str]) -> Words:
    """Tell `KEY=VALUE` words from `ranks=N`, `threads=N` and `env.NAME=VALUE`; a later word wins.

    Raises:
        UserError: one of the latter is wrong.
    """
    kept, ranks, variables = [], 1, dict[str, str]()
    for word in words:
        key, separator, value = word.partition("=")
        if key in (RANKS, THREADS):
            if not re.fullmatch(r"[1-9][0-9]{0,3}", value):
                raise UserError(f"{key}: {shown(value)} given, a whole number from 1 to 9999 wanted")
            if key == RANKS:
                ranks = int(value)
            else:
                variables[THREADS_OF] = value
        elif key.startswith(VARIABLE):
            name = key.removeprefix(VARIABLE)
            if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise UserError(f"{shown(word)}: wanted env.NAME=VALUE, for example env.OMP_NUM_THREADS=2")
            variables[name] = value
        else:
            kept.append(word)
    return Words(tuple(kept), ranks, variables)


def side(config: Settings, ranks: int, variables: Mapping[str, str]) -> Side:
    """The side of a config.

    Raises:
        UserError: as `checked`.
    """
    flat = config.flat()
    neutral = flat.keys() - flatten(config.addressed()).keys() - config.environmental().keys() - {"seed"}
    return checked(Side(flat, frozenset(neutral), ranks, variables))


def checked(given: Side) -> Side:
    """The same side.

    Raises:
        UserError: more ranks than micro-batches, an unknown flag, or a variable that a flag sets otherwise.
    """
    require_ranks(given.config, given.ranks)
    missing_variables(given.determinism, given.variables, replaces=False)  # a side asks for them
    return given


def require_ranks(config: Mapping[str, Any], ranks: int) -> None:
    """Refuse more ranks than micro-batches."""
    micro_batches = config["parallel.micro_batches"]
    if ranks > micro_batches:
        raise UserError(f"ranks={ranks} given, at most parallel.micro_batches={micro_batches} wanted: each runs one")


def is_own(key: str) -> bool:
    """Whether a bisect sets this key itself."""
    return key in OWN or key.startswith(OWN_SECTIONS)


def suspects(a: Side, b: Side, files: Iterable[str] = ()) -> list[Suspect]:
    """All in which the sides differ; `files` are those of the package that differ between their commits."""
    found = [
        Suspect(key, Kind.KEY, key, a.config.get(key), b.config.get(key))
        for key in sorted(a.config.keys() | b.config.keys())
        if a.config.get(key) != b.config.get(key) and key != RELAX and not is_own(key) and not _starts(key)
    ]
    if _started(a) != _started(b):
        found.append(Suspect(START, Kind.START, START, _started(a), _started(b)))
    portable = is_portable(a.determinism) or is_portable(b.determinism)
    for flag in FLAGS:
        here, there = (flag.name in each.relaxed for each in (a, b))
        if here != there and (portable or not flag.portable):
            words = {True: "relaxed", False: "strict"}
            found.append(Suspect(f"flag {flag.name}", Kind.FLAG, flag.name, words[here], words[there]))
    if a.ranks != b.ranks:
        found.append(Suspect(RANKS, Kind.RANKS, RANKS, a.ranks, b.ranks))
    for name in sorted(a.variables.keys() | b.variables.keys()):
        values = a.variables.get(name), b.variables.get(name)
        if values[0] != values[1]:
            display = THREADS if name == THREADS_OF else f"{VARIABLE}{name}"
            found.append(Suspect(display, Kind.VARIABLE, name, *values))
    commits = [f"as in {(each.commit or '')[:12]}" for each in (a, b)]
    found += [Suspect(f"file {plain(name)}", Kind.FILE, name, *commits) for name in files]
    return found


def _starts(key: str) -> bool:
    return key.startswith(f"{START}.")


def _started(side: Side) -> str:
    """What decides with which state a run begins, for display; wherever that lies."""
    held = {name: side.config.get(f"{START}.{name}") for name in ADDRESSED}
    return ", ".join(f"{name} {digest}" for name, digest in held.items() if digest) or "drawn by the seed"


def composed(a: Side, b: Side, all_of_them: Sequence[Suspect], kept: Iterable[str]) -> Setup:
    """B, with A's values for the suspects of these names.

    Raises:
        UserError: it has more ranks than micro-batches.
    """
    kept = frozenset(kept)
    config = dict(b.config)
    relaxed, ranks, variables, files = b.relaxed, b.ranks, dict(b.variables), set[str]()
    for each in all_of_them:
        if each.name not in kept:
            continue
        if each.kind is Kind.KEY:
            config.pop(each.key, None)
            config |= {each.key: a.config[each.key]} if each.key in a.config else {}
        elif each.kind is Kind.START:
            config = {key: value for key, value in config.items() if not _starts(key)}
            config |= {key: value for key, value in a.config.items() if _starts(key)}
        elif each.kind is Kind.FLAG:
            relaxed = relaxed - {each.key} if each.a == "strict" else relaxed | {each.key}
        elif each.kind is Kind.RANKS:
            ranks = a.ranks
        elif each.kind is Kind.VARIABLE:
            variables.pop(each.key, None)
            variables |= {each.key: a.variables[each.key]} if each.key in a.variables else {}
        else:
            files.add(each.key)
    config[RELAX] = sorted(relaxed)
    held = {flag.name for flag in applicable(Determinism(cpu=config[CPU], relax=tuple(config[RELAX])))}
    # a variable that a flag holds has no say
    free = {name: value for name, value in variables.items() if name not in held}
    require_ranks(config, ranks)
    config |= {key: value for key, value in OWN.items() if key in config}  # another commit may lack one
    return Setup(config, ranks, free, frozenset(files), b.commit, a.commit)


def field_of(suspect: Suspect) -> str:
    """Its field in the content address or the numeric environment."""
    names = {
        Kind.KEY: "seed" if suspect.key == "seed" else f"config.{suspect.key}",
        Kind.START: f"{START}.weights",
        Kind.FLAG: f"flags.{suspect.key}",
        Kind.RANKS: "world_size",
        Kind.VARIABLE: f"variables.{suspect.key}",
        Kind.FILE: f"code.{suspect.key}",
    }
    return names[suspect.kind]


def fault(suspect: Suspect, a: Side, b: Side) -> str | None:
    """Return why a suspect cannot be a cause if all code is correct; None if it can be one."""
    if suspect.kind is Kind.RANKS:
        # In commits with an earlier release, DistributedDataParallel may sum the gradients: the world size is a cause.
        is_cause = any(side.config.get("parallel.reduce") == "ddp" for side in (a, b))
        return None if is_cause else WHY_RANKS
    is_neutral = suspect.kind is Kind.KEY and suspect.key in a.neutral & b.neutral
    return WHY_NEUTRAL if is_neutral else None
