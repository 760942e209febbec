"""What is done with the table of switches: each row is set, read back, held until the end, and recorded.

Variables are read by libraries once, when they load, so they must stand before torch is imported
(`set_environment`); the other switches are set after (`apply`).
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from . import libraries
from .errors import Refused
from .flag_table import ALLOCATION, ALLOCATION_DECIDED, torch_of
from .flag_table import SWITCHES as SWITCHES
from .flag_table import Switch as Switch
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


def applicable(determinism: Determinism) -> list[Switch]:
    """The rows a run here must hold: those not relaxed, the portable ones where they apply."""
    names = {switch.name for switch in SWITCHES}
    for name in determinism.relax:
        if name not in names | {"all"}:
            raise Refused(f"determinism.relax: unknown switch {name!r}; known: all, {', '.join(sorted(names))}")
    portable = is_portable(determinism)
    return [
        switch
        for switch in SWITCHES
        if not {"all", switch.name} & set(determinism.relax) and (portable or not switch.portable)
    ]


def missing_variables(
    determinism: Determinism, environ: Mapping[str, str] = os.environ, replaces: bool = True
) -> dict[str, str]:
    """The variables still to be set, by name; with `replaces` those that schedulers set for every job are set anew.

    Raises:
        Refused: variables that hold another value and are not replaced; they are named, never overridden.
    """
    missing, contradictions = {}, []
    for switch in applicable(determinism):
        if switch.setting is None:
            continue
        seen = environ.get(switch.name)
        if seen is None or (replaces and switch.scheduled and seen != switch.setting):
            missing[switch.name] = switch.setting
        elif seen != switch.setting:
            contradictions.append(
                f"{switch.name}={seen} is set, {switch.setting} is wanted ({switch.why}). "
                f"Unset it, or leave the switch off: --set 'determinism.relax=[{switch.name}]'"
            )
    if contradictions:
        raise Refused("\n".join(contradictions))
    return missing


def set_environment(determinism: Determinism) -> None:
    """Put every variable in place. Where one was missing, start the same command again, once.

    Some variables work only from process start (PYTHONHASHSEED), others only before torch or numpy
    load. Starting again serves both, and after it nothing is missing.
    """
    if missing := told_variables(determinism):
        os.environ.update(missing)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def told_variables(determinism: Determinism, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All that is still to be set: `missing_variables`, and how memory is kept where the user has not decided that.

    One line per command says which of them a scheduler has set otherwise.
    """
    missing = missing_variables(determinism, environ)
    replaced = [f"{name}={environ[name]}" for name in missing if name in environ]
    if replaced and os.environ.get("RANK", "0") == "0":
        _tell(f"{', '.join(replaced)}: replaced by 1 in this run, because the number of threads decides bits")
    decided = any(ALLOCATION_DECIDED.match(f"{name}={value}") for name, value in environ.items())
    return missing | ({} if decided else ALLOCATION)


@cache  # a command may start many trainings
def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def apply(determinism: Determinism) -> None:
    """Set every applicable switch that is not a variable, then check that all of them are effective.

    Raises:
        Refused: switches whose effective value is not the strict one.
    """
    rows = applicable(determinism)
    for switch in rows:
        if switch.write:
            switch.write(switch.strict)
    wrong = [(switch, seen) for switch in rows if (seen := switch.effective()) != switch.strict]
    if wrong:
        raise Refused(
            "\n".join(
                f"switch {row.name}: {seen!r} is effective, {row.strict!r} wanted: {row.why}" for row, seen in wrong
            )
        )
    if getattr(*torch_of("get_num_threads"))() > 1:
        libraries.touch_vector_functions()
    _stated.update(effective())


def require_held(local: bool = False) -> None:
    """Refuse code that has changed a switch since `apply`, relaxed or not: records state the values of then.

    Raises:
        Refused: it names each switch; a `local` one is of this rank.
    """
    lines = [
        f"switch {row.name}: {seen!r} is effective, {_stated[row.name]!r} wanted: {row.why}. Code of this project "
        f"changed it after the run began: remove that line. Or relax the switch and change it before the run begins: "
        f"--set 'determinism.relax=[{row.name}]'"
        for row in SWITCHES
        if row.name in _stated and (seen := row.effective()) != _stated[row.name]
    ]
    if lines:
        raise Refused("\n".join(lines), local=local)


def let_go() -> None:
    """The run has ended: nothing is held any longer."""
    _stated.clear()


def effective() -> dict[str, Value]:
    """The value of every switch as it is now, by name."""
    return {switch.name: switch.effective() for switch in SWITCHES}
