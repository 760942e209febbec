"""What is done with the table of flags: each row is set, read back, held until the end, and recorded.

Variables are read by libraries once, when they load, so they must stand before torch is imported
(`set_environment`); the other flags are set after (`apply`).
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from . import libraries
from .errors import UserError
from .flag_table import ALLOCATION, ALLOCATION_DECIDED, torch_of
from .flag_table import FLAGS as FLAGS
from .flag_table import Flag as Flag
from .libraries import Value
from .options import Determinism

_stated: dict[str, Value] = {}  # what `apply` has found effective


def can_be_portable(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU can compute the portable bits: x86-64 with AVX2, on Linux."""
    return (
        platform.machine() == "x86_64"
        and cpuinfo.is_file()
        and re.search(r"^flags\s*:.*\bavx2\b", cpuinfo.read_text(), re.MULTILINE) is not None
    )


def is_portable(determinism: Determinism) -> bool:
    """Whether the portable rows apply to a run here."""
    return determinism.cpu == "portable" and can_be_portable()


def applicable(determinism: Determinism) -> list[Flag]:
    """The rows a run here must hold: those not relaxed, the portable ones where they apply."""
    names = {flag.name for flag in FLAGS}
    for name in determinism.relax:
        if name not in names | {"all"}:
            raise UserError(f"determinism.relax: unknown flag {name!r}; known: all, {', '.join(sorted(names))}")
    portable = is_portable(determinism)
    return [
        flag for flag in FLAGS if not {"all", flag.name} & set(determinism.relax) and (portable or not flag.portable)
    ]


def missing_variables(
    determinism: Determinism, environ: Mapping[str, str] = os.environ, replaces: bool = True
) -> dict[str, str]:
    """The variables still to be set, by name; with `replaces` those that schedulers set for every job are set anew.

    Raises:
        UserError: variables that hold another value and are not replaced; they are named, never overridden.
    """
    missing, contradictions = {}, []
    for flag in applicable(determinism):
        if flag.setting is None:
            continue
        seen = environ.get(flag.name)
        if seen is None or (replaces and flag.scheduled and seen != flag.setting):
            missing[flag.name] = flag.setting
        elif seen != flag.setting:
            contradictions.append(
                f"{flag.name}={seen} is set, {flag.setting} is wanted ({flag.why}). "
                f"Unset it, or leave the flag off: --set 'determinism.relax=[{flag.name}]'"
            )
    if contradictions:
        raise UserError("\n".join(contradictions))
    return missing


def set_environment(determinism: Determinism) -> None:
    """Put every variable in place. Where one was missing, start the same command again, once.

    Some variables work only from process start (PYTHONHASHSEED), others only before torch or numpy
    load. Starting again serves both, and after it nothing is missing.
    """
    if missing := stated_variables(determinism):
        os.environ.update(missing)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def stated_variables(determinism: Determinism, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All that is still to be set: `missing_variables`, and how memory is kept where the user has not decided that.

    One line per command says which of them a scheduler has set otherwise.
    """
    missing = missing_variables(determinism, environ)
    replaced = [f"{name}={environ[name]}" for name in missing if name in environ]
    if replaced and os.environ.get("RANK", "0") == "0":
        _report(f"{', '.join(replaced)}: replaced by 1 in this run, because the number of threads decides bits")
    decided = any(ALLOCATION_DECIDED.match(f"{name}={value}") for name, value in environ.items())
    return missing | ({} if decided else ALLOCATION)


@cache  # a command may start many trainings
def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def apply(determinism: Determinism) -> None:
    """Set every applicable flag that is not a variable, then check that all of them are effective.

    Raises:
        UserError: flags whose effective value is not the one that is wanted.
    """
    rows = applicable(determinism)
    for flag in rows:
        if flag.write:
            flag.write(flag.wanted(determinism))
    wrong = [
        f"flag {row.name}: {seen!r} is effective, {wanted!r} wanted: {row.why}"
        for row in rows
        if (seen := row.effective()) != (wanted := row.wanted(determinism))
    ]
    if wrong:
        raise UserError("\n".join(wrong))
    if getattr(*torch_of("get_num_threads"))() > 1:
        libraries.touch_vector_functions()
    _stated.update(effective())


def require_held(local: bool = False) -> None:
    """Refuse code that has changed a flag since `apply`, relaxed or not: records state the values of then.

    Raises:
        UserError: it names each flag; a `local` one is of this rank.
    """
    lines = [
        f"flag {row.name}: {seen!r} is effective, {_stated[row.name]!r} wanted: {row.why}. Code of this project "
        f"changed it after the run began: remove that line. Or relax the flag and change it before the run begins: "
        f"--set 'determinism.relax=[{row.name}]'"
        for row in FLAGS
        if row.name in _stated and (seen := row.effective()) != _stated[row.name]
    ]
    if lines:
        raise UserError("\n".join(lines), local=local)


def let_go() -> None:
    """The run has ended: nothing is held any longer."""
    _stated.clear()


def effective() -> dict[str, Value]:
    """The value of every flag as it is now, by name."""
    return {flag.name: flag.effective() for flag in FLAGS}
