"""The run that a directory held before: what a new one moves to earlier/, replaces or removes, and how it goes on."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..address.address import ContentAddress, digest
from ..base.files import PART, free, part
from ..base.text import Difference, differences, named, short, some
from ..core.errors import UserError
from . import names
from .classes import environments
from .lock import RunLock
from .reading import read_record
from .record import files as logged_files
from .removal import CUT_SHORT, SAVED, own, remove_checkpoint, remove_empty

TRACED = re.compile(
    rf"(steps|tensors)\.bin|(tensors|profile\d+)\.json(\.part)?|values\d*\.safetensors|rank\d+\.jsonl|{CUT_SHORT}"
)


Calling = Callable[[Mapping[str, str]], dict[str, Any]]  # the environment here of a run of such operations


def require_replaceable(out: Path, finished: str, address: ContentAddress, calling: Calling) -> None:
    """Refuse to have another run in `out` than the finished one, where `record.finished` is `refuse`."""
    if finished == "refuse" and (other := _other(out, address, calling)):
        raise UserError(
            f"{out} holds a finished run of {other}, and record.finished is refuse. "
            f"Choose another folder with --out, or keep that run aside: --set record.finished=keep"
        )


def clear(out: Path, finished: str, address: ContentAddress, calling: Calling, report: Callable[[str], None]) -> None:
    """Make room for a new record: a finished run other than this very one is moved to earlier/, and no crash loses it.

    One that is to be replaced gets a name there by which `drop_replaced` knows it.

    Raises:
        UserError: something of an older run cannot be removed.
    """
    mark = names.REPLACED if finished == "replace" else ""
    for moved in (out / names.EARLIER).glob(f".*{PART}/{names.RUN}"):  # a crash came before its last rename
        _name(moved.parent, mark)
    facts = _facts(out)
    other = _other(out, address, calling)
    try:
        _remove_checkpoints(out)  # a finished run has its weights
        if facts and other:
            kept = _moved(out, facts, mark, [])
            until = ", until this one has finished" if mark else ""
            report(f"{out} held the finished run of {other}; it is kept in {kept}{until}")
        elif facts:
            _remove_logged(out, facts)
        _remove_trace(out)
    except OSError as error:
        raise UserError(
            f"{error.filename}: of an older run, and not removable ({error.strerror}): remove it by hand, "
            f"or choose another folder with --out"
        ) from None


def _facts(out: Path) -> dict[str, Any]:
    """What the record in `out` says; nothing where there is none."""
    return read_record(out, names.RUN) if (out / names.RUN).is_file() else {}


def _other(out: Path, address: ContentAddress, calling: Calling) -> str | None:
    """In which way the finished run in `out` is not that of this address and environment; None: in none."""
    if not (facts := _facts(out)):
        return None
    if (there := facts["tags"]["repro.address"]) != address.digest:
        return f"another content address ({there[:16]})"
    begun = read_record(out, names.ENVIRONMENT)
    here = calling(begun["informational"].get("non_portable", {}))
    if environments(begun) == (digest(here),):
        return None
    differing = differences(begun["preimage"], here)
    return f"another numeric environment ({named(differing, 'there', 'here') if differing else begun['class']})"


def set_aside(out: Path) -> Path | None:
    """Move the run in `out`, finished or not, with its checkpoints to earlier/; where to. None: there is none.

    Raises:
        UserError: another process writes there.
    """
    if not (out / names.RUN).is_file():
        return None
    lock = RunLock(out)
    lock.acquire()
    try:
        return _moved(out, read_record(out, names.RUN), "", own(out / names.CHECKPOINTS, SAVED))
    finally:
        lock.release()


def _moved(out: Path, facts: Mapping[str, Any], mark: str, checkpoints: Sequence[Path]) -> Path:
    """Move the run in `out` to earlier/; where to. What the owner has put beside its files stays."""
    beside = part(out / names.EARLIER / f".{facts['tags']['repro.address'][:16]}-{facts['id'][:8]}")
    files = [*checkpoints, *own(out / names.TRACE, TRACED), *logged_files(out, facts)]
    files += [out / name for name in sorted(names.FILES - {names.LOCK, names.RUN})]
    # run.json last: as long as it is there, a start after a crash goes on with this
    for file in [*files, out / names.RUN]:
        if file.exists():
            target = beside / file.relative_to(out)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
    _remove_logged(out, facts)  # the folders in which they lay
    return _name(beside, mark)


def _name(beside: Path, mark: str) -> Path:
    return beside.rename(free(beside.with_name(mark + beside.name[1 : -len(PART)])))


def of_another_address(out: Path, differing: Sequence[Difference]) -> UserError:
    """The refusal of a directory that holds an unfinished run of another content address, with three ways to go on."""
    place = out.absolute()
    values = [f"{each.field}: {short(each.one)} there, {short(each.other)} here" for each in differing]
    beside, aside = (shlex.quote(str(free(each))) for each in (out, out.parent / f"{place.name}-unfinished"))
    return UserError(
        f"{out} holds an unfinished run of another content address ({some(values)}). "
        f"To finish that one, repeat the command with {_requested_there(out, differing)}. "
        f"To leave it as it is, begin this one elsewhere: --out {beside}. "
        f"To have this one here, give --fresh, or move that one away: mv {shlex.quote(str(out))} {aside}"
    )


def _requested_there(out: Path, differing: Sequence[Difference]) -> str:
    """What the command has to be given so that the unfinished run in `out` goes on."""
    keys = {each.field.removeprefix("config."): each.one for each in differing if each.field.startswith("config.")}
    keys |= {each.field: each.one for each in differing if each.field == "seed"}
    words = [f"--set {shlex.quote(f'{key}={json.dumps(value)}')}" for key, value in keys.items() if value is not None]
    parts = {each.field.partition(".")[0] for each in differing}
    parts |= {"code"} if "core" in parts else set()
    code = read_record(out, names.RUN)["code"]
    commit = f" of commit {code['commit'][:12]}" if code["commit"] else ""
    known = {
        "code": f"its code{commit}{f' and {out / names.PATCH}' if code['patch'] else ''}",
        "data": "its prepared data",
        "lock": "its locks",
        "world_size": "its number of ranks",
        "start": f"--from {shlex.quote(start)}" if (start := _started_from(out)) else "no --from",
    }
    return " and ".join(
        [*filter(None, [" ".join(words)]), *(message for part, message in known.items() if part in parts)]
    )


def _started_from(out: Path) -> str:
    """The run directory from which the run in `out` started; empty where it drew its weights."""
    return str(read_record(out, names.RUN)["config"].get("start.run") or "")


def drop_replaced(out: Path, report: Callable[[str], None]) -> None:
    """Remove the finished runs in whose place the one in `out` has come, now that it has finished, too."""
    earlier = out / names.EARLIER
    try:
        for replaced in earlier.glob(f"{names.REPLACED}*"):
            if (replaced / names.RUN).is_file():
                _remove_logged(replaced, read_record(replaced, names.RUN))
            # that first: without it, there is no run
            for name in sorted(names.FILES, key=lambda name: name != names.RUN):
                (replaced / name).unlink(missing_ok=True)
            _remove_checkpoints(replaced)
            _remove_trace(replaced)
            remove_empty(replaced)
        remove_empty(earlier)
    except OSError as error:
        report(f"{earlier}: a replaced run is not removable ({error.strerror}: {error.filename}): remove it by hand")


def _remove_logged(out: Path, facts: Mapping[str, Any]) -> None:
    """Remove the files that the loop of the run in `out` has logged, and folders that are empty then."""
    for file in logged_files(out, facts):
        file.unlink(missing_ok=True)
        for folder in file.relative_to(out).parents[:-1]:
            remove_empty(out / folder)


def _remove_checkpoints(out: Path) -> None:
    """Remove the checkpoints of the run in `out`, and the damaged ones that were set aside."""
    for checkpoint in own(out / names.CHECKPOINTS, SAVED):
        remove_checkpoint(checkpoint)
    remove_empty(out / names.CHECKPOINTS)


def _remove_trace(out: Path) -> None:
    for file in own(out / names.TRACE, TRACED):
        file.unlink()
    remove_empty(out / names.TRACE)
