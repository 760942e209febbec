"""Opening of a run directory: a new record begins, or an unfinished one of the same content address goes on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..address.address import ContentAddress, digest
from ..base.files import PART, write_json
from ..base.project import Project
from ..base.text import differences, named, some
from ..config.settings import Settings
from ..core.errors import UserError
from ..guards import stages
from . import names
from .classes import class_of, described
from .code_state import code_state, require_no_secret, summary
from .reading import read_record
from .record import Record

SHOWN = 6  # operations that have a line of their own
FOLDERS = (names.CHECKPOINTS, names.TRACE, names.LOGGED_FILES, names.EARLIER)


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
    if not out.is_dir() or _has_had_one(out):
        return
    written = {path.name for path in stages.outputs(project) if path.parent.resolve() == out.resolve()}
    ours = written | names.FILES | {f"{name}{PART}" for name in names.FILES} | {names.EARLIER}
    if foreign := sorted(path.name for path in out.iterdir() if path.name not in ours and path.name[0] != "."):
        raise UserError(
            f"{out}: {some(foreign)} seen and no {names.RUN}, an empty folder or a run's wanted: nothing is removed "
            f"or written there. Choose another with --out"
        )


def opener(
    project: Project,
    config: Settings,
    out: Path,
    address: ContentAddress,
    environment: dict[str, Any],
    calling: Callable[[Mapping[str, str]], dict[str, Any]],
    report: Callable[[str], None],
) -> Callable[[], Record]:
    """What opens the run directory `out` for a run of `address` on `environment` (what environment.json is to hold).

    `calling` gives the preimage of the environment here of a run that calls such operations; before step 0 nobody
    knows them. Before the function that is returned is called, nothing is written, moved or removed.

    Raises:
        UserError: it holds an unfinished run of another content address, or a finished one of another address or
            environment where `record.finished` is `refuse`; or uncommitted code looks like a secret.
    """
    record = Record(out)
    if record.unfinished():
        if differing := differences(read_record(out, names.ADDRESS)["preimage"], address.preimage):
            from .former import of_another_address

            raise of_another_address(out, differing)
        return partial(_go_on, out, record, environment, config.compute.plain, report)
    code, patch = code_state(project)
    require_no_secret(patch)
    facts = {
        "code": code,
        "config": config.flat(),
        "tracking": config.tracking.model_dump(),
        "dataset": {"name": Path(config.data.raw).name, "digest": address.parts["data"]},
        "tags": {
            "repro.address": address.digest,
            "repro.environment": digest(environment["preimage"]),
            "repro.data": address.parts["data"],
            "repro.lock": address.parts["lock"],
            "repro.core": address.parts["core"],
            "repro.commit": code["commit"],
            "repro.dirty": code["dirty"],
            "repro.image": environment["preimage"]["image"],
        },
    }
    clear: Callable[[], None] | None = None
    if _has_had_one(out):
        from . import former  # which few runs need

        before = out, config.record.finished, address, calling
        former.require_replaceable(*before)
        clear = partial(former.clear, *before, report)

    def begin() -> Record:
        if clear:
            clear()
        if line := summary(patch):
            report(line)
        # before run.json: that file says that there is a run to go on with, and going on needs its address
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / names.ADDRESS, address.record())
        write_json(out / names.ENVIRONMENT, environment)
        record.begin(patch, **facts)
        return record

    return begin


def _has_had_one(out: Path) -> bool:
    """Whether a run has had this directory; after a crash in the instant between two, only the earlier one says so."""
    return (out / names.RUN).is_file() or (out / names.EARLIER).is_dir()


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


def change_environment(
    out: Path,
    record: Record,
    environment: dict[str, Any],
    plain: bool,
    before: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write down another numeric environment for the run; those `before` it are known, unless they are given.

    It comes before any checkpoint that names this one.
    """
    if before is None:
        before = read_record(out, names.ENVIRONMENT).get("before", ())
    stated = environment | described(environment["preimage"], plain, before)
    write_json(out / names.ENVIRONMENT, stated)
    record.describe(tags=record.tags | {"repro.environment": stated["environment"]})


def _go_on(
    out: Path, record: Record, environment: dict[str, Any], plain: bool, report: Callable[[str], None]
) -> Record:
    """Write down the numeric environment of a resumed run, and those before it; say so if its class is another one."""
    record.resume()
    earlier, here = read_record(out, names.ENVIRONMENT), environment["preimage"]
    before = earlier.get("before", [])
    if earlier["preimage"] != here and earlier["preimage"] not in before:
        before = [*before, earlier["preimage"]]
    if class_of(earlier["preimage"], plain) != class_of(here, plain):
        differing = named(differences(earlier["preimage"], here), "there", "here")
        record.comparable = False
        report(f"resuming {out} in another numeric environment: equal bits are not guaranteed. {differing}")
    change_environment(out, record, environment, plain, before)
    return record
