"""Opening of a run directory: a new record begins, or an unfinished one of the same content address goes on."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..address.address import ContentAddress, digest
from ..base.files import PART, free, part, write_json
from ..base.project import Project
from ..base.text import Difference, differences, named, some
from ..config.settings import Settings
from ..core.errors import UserError
from ..guards import stages
from . import names
from .classes import class_of, described
from .code_state import code_state, require_no_secret, summary
from .reading import read_record
from .record import Record
from .removal import remove_checkpoints, remove_trace, traced

SHOWN = 6  # operations that have a line of their own
FOLDERS = (names.CHECKPOINTS, names.TRACE, names.EARLIER)


@dataclass(frozen=True)
class Opened:
    """A record that is open for writing."""

    record: Record
    resumed: bool  # an earlier process began it


def require_run_directory(project: Project, out: Path) -> None:
    """Refuse a directory in which a run would overwrite files that no run wrote. Nothing is written yet.

    Raises:
        UserError: it holds other files and no run, or one of its folders is a link into another place.
    """
    for name in FOLDERS:
        if (out / name).is_symlink():
            raise UserError(
                f"{out / name}: a link seen, a folder of this run's own wanted: remove the link. To have a run on "
                f"another disk, name a place there with --out"
            )
    # after a crash in the instant between two runs, only the earlier one tells that this is a run directory
    if not out.is_dir() or (out / names.RUN).is_file() or (out / names.EARLIER).is_dir():
        return
    written = {path.name for path in stages.outputs(project) if path.parent.resolve() == out.resolve()}
    ours = written | names.FILES | {f"{name}{PART}" for name in names.FILES} | {names.EARLIER}
    if foreign := sorted(path.name for path in out.iterdir() if path.name not in ours and path.name[0] != "."):
        raise UserError(
            f"{out}: {some(foreign)} seen and no {names.RUN}, an empty folder or a run's wanted: nothing is removed "
            f"or written there. Choose another with --out"
        )


def open_run(
    project: Project,
    config: Settings,
    out: Path,
    address: ContentAddress,
    environment: dict[str, Any],
    calling: Callable[[Mapping[str, str]], dict[str, Any]],
    report: Callable[[str], None],
) -> Opened:
    """Open the run directory `out` for a run of `address` on `environment` (what environment.json is to hold).

    `calling` gives the preimage of the environment here of a run that calls such operations; before step 0 nobody
    knows them.

    Raises:
        UserError: it holds an unfinished run of another content address, a finished one of another address or
            environment where `record.finished` is `refuse`, or what cannot be removed; or uncommitted code looks like
            a secret.
    """
    record = Record(out)
    resumed = record.unfinished()
    if resumed:
        _require_same_address(out, address)
        record.resume(environment["environment"])
        _record_environment(out, record, environment, config.compute.plain, report)
        return Opened(record, resumed)
    code, patch = code_state(project)
    require_no_secret(patch)
    _clear(out, config.record.finished, address, calling, report)
    if line := summary(patch):
        report(line)
    # before run.json: that file says that there is a run to go on with, and going on needs its address
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / names.ADDRESS, address.record())
    write_json(out / names.ENVIRONMENT, environment)
    record.begin(
        patch,
        code=code,
        environments=[environment["environment"]],
        config=config.flat(),
        tracking=config.tracking.model_dump(),
        dataset={"name": Path(config.data.raw).name, "digest": address.parts["data"]},
        tags={
            "repro.address": address.digest,
            "repro.environment": digest(environment["preimage"]),
            "repro.data": address.parts["data"],
            "repro.lock": address.parts["lock"],
            "repro.core": address.parts["core"],
            "repro.commit": code["commit"],
            "repro.dirty": code["dirty"],
            "repro.image": environment["preimage"]["image"],
        },
    )
    return Opened(record, resumed)


def non_portable(out: Path) -> dict[str, str]:
    """Operations that the run in `out` calls and that took it out of the portable class, with a line on each."""
    return read_record(out, names.ENVIRONMENT)["informational"].get("non_portable", {})


def non_portable_before(out: Path) -> dict[str, str]:
    """Those of an unfinished run in `out`, if there is one."""
    return non_portable(out) if Record(out).unfinished() and (out / names.ENVIRONMENT).is_file() else {}


def reported_of(non_portable: Mapping[str, str]) -> list[str]:
    """The lines on operations that take a run out of the portable class, if there are any: a few, and how many more."""
    lines = list(non_portable.values())[:SHOWN]
    if more := len(non_portable) - len(lines):
        lines.append(f"{more} more operations: see cpu.non-portable in {names.ENVIRONMENT}")
    if lines:
        lines.append("this run is out of the class cpu-portable: another CPU may compute other bits")
    return lines


def change_environment(out: Path, record: Record, environment: dict[str, Any], plain: bool) -> None:
    """Write down another numeric environment for the run, before any checkpoint names the one that it began with."""
    begun, here = read_record(out, names.ENVIRONMENT), environment["preimage"]
    write_json(out / names.ENVIRONMENT, environment | described(here, plain, begun.get("before", ())))
    record.change_environment(digest(begun["preimage"]), digest(here))


def _clear(
    out: Path,
    finished: str,
    address: ContentAddress,
    calling: Callable[[Mapping[str, str]], dict[str, Any]],
    report: Callable[[str], None],
) -> None:
    """Make room for a new record: a finished run other than this very one is moved to earlier/, and no crash loses it.

    One that is to be replaced gets a name there by which `removal.drop_replaced` knows it.
    """
    mark = names.REPLACED if finished == "replace" else ""
    for moved in (out / names.EARLIER).glob(f".*{PART}/{names.RUN}"):  # a crash came before its last rename
        _name(moved.parent, mark)
    facts = read_record(out, names.RUN) if (out / names.RUN).is_file() else None
    other = facts and _other(out, facts, address, calling)
    if other and finished == "refuse":
        raise UserError(
            f"{out} holds a finished run of {other}, and record.finished is refuse. "
            f"Choose another folder with --out, or keep that run aside: --set record.finished=keep"
        )
    try:
        remove_checkpoints(out)  # a finished run has its weights
        if facts and other:
            kept = _moved(out, facts, mark)
            until = ", until this one has finished" if mark else ""
            report(f"{out} held the finished run of {other}; it is kept in {kept}{until}")
        remove_trace(out)
    except OSError as error:
        raise UserError(
            f"{error.filename}: of an older run, and not removable ({error.strerror}): remove it by hand, "
            f"or choose another folder with --out"
        ) from None


def _other(
    out: Path,
    facts: Mapping[str, Any],
    address: ContentAddress,
    calling: Callable[[Mapping[str, str]], dict[str, Any]],
) -> str | None:
    """In which way the finished run in `out` is not that of this address and environment; None: in none."""
    if (there := facts["tags"]["repro.address"]) != address.digest:
        return f"another content address ({there[:16]})"
    begun = read_record(out, names.ENVIRONMENT)
    here = calling(begun["informational"].get("non_portable", {}))
    if facts.get("environments", [begun["environment"]]) == [digest(here)]:
        return None
    differing = differences(begun["preimage"], here)
    return f"another numeric environment ({named(differing, 'there', 'here') if differing else begun['class']})"


def _moved(out: Path, facts: Mapping[str, Any], mark: str) -> Path:
    """Move the finished run in `out` to earlier/; where to. What the owner has put beside its files stays."""
    beside = part(out / names.EARLIER / f".{facts['tags']['repro.address'][:16]}-{facts['id'][:8]}")
    files = [*traced(out), *(out / name for name in sorted(names.FILES - {names.LOCK, names.RUN}))]
    # run.json last: as long as it is there, a start after a crash goes on with this
    for file in [*files, out / names.RUN]:
        if file.exists():
            target = beside / file.relative_to(out)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
    return _name(beside, mark)


def _name(beside: Path, mark: str) -> Path:
    return beside.rename(free(beside.with_name(mark + beside.name[1 : -len(PART)])))


def _require_same_address(out: Path, address: ContentAddress) -> None:
    there = read_record(out, names.ADDRESS)["preimage"]
    if differing := differences(there, address.preimage):
        place = out.absolute()
        beside, aside = (shlex.quote(str(free(each))) for each in (out, out.parent / f"{place.name}-unfinished"))
        raise UserError(
            f"{out} holds an unfinished run of another content address ({named(differing, 'there', 'here')}). "
            f"To finish that one, repeat the command with {_requested_there(out, differing)}. "
            f"To leave it as it is, begin this one elsewhere: --out {beside}. "
            f"To have this one here, move that one away first: mv {shlex.quote(str(out))} {aside}"
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
    }
    return " and ".join(
        [*filter(None, [" ".join(words)]), *(message for part, message in known.items() if part in parts)]
    )


def _record_environment(
    out: Path, record: Record, environment: dict[str, Any], plain: bool, report: Callable[[str], None]
) -> None:
    """Write down the numeric environment of a resumed run, and those before it; say so if its class is another one."""
    earlier, here = read_record(out, names.ENVIRONMENT), environment["preimage"]
    before = earlier.get("before", [])
    if earlier["preimage"] != here and earlier["preimage"] not in before:
        before = [*before, earlier["preimage"]]
    if class_of(earlier["preimage"], plain) != class_of(here, plain):
        differing = named(differences(earlier["preimage"], here), "there", "here")
        report(f"resuming {out} in another numeric environment: equal bits are not guaranteed. {differing}")
    stated = environment | described(here, plain, before)
    write_json(out / names.ENVIRONMENT, stated)
    record.describe(tags=read_record(out, names.RUN)["tags"] | {"repro.environment": stated["environment"]})
