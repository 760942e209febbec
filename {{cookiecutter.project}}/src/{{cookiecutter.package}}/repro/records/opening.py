"""Opening of a run directory: a new record begins, or an unfinished one of the same content address goes on."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..asked.address import ContentAddress, digest
from ..asked.settings import Settings
from ..differences import differences, named
from ..errors import Refused
from ..files import read_json, write_json
from ..project import Project
from . import names
from .code_state import code_state
from .record import Record


@dataclass(frozen=True)
class Opened:
    """A record that is open for writing."""

    record: Record
    resumed: bool  # an earlier process began it


def open_run(
    project: Project,
    config: Settings,
    out: Path,
    address: ContentAddress,
    environment: dict[str, Any],
    tell: Callable[[str], None],
) -> Opened:
    """Open the run directory `out` for a run of `address` on `environment` (what environment.json is to hold).

    Raises:
        Refused: it holds an unfinished run of another content address.
    """
    record = Record(out)
    resumed = record.unfinished()
    if resumed:
        _require_same_address(out, address)
        record.resume()
        _record_environment(out, environment, tell)
        return Opened(record, resumed)
    for left in (names.CHECKPOINTS, names.TRACE):  # by an older run
        shutil.rmtree(out / left, ignore_errors=True)
    # before run.json: that file says that there is a run to go on with, and going on needs its address
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / names.ADDRESS, address.record())
    write_json(out / names.ENVIRONMENT, environment)
    code, patch = code_state(project)
    record.begin(
        patch,
        code=code,
        config=config.flat(),
        tracking=config.tracking.model_dump(),
        dataset={"name": Path(config.data.raw).name, "digest": address.parts["data"]},
        tags={
            "repro.address": address.digest,
            "repro.environment": digest(environment["preimage"]),
            "repro.data": address.parts["data"],
            "repro.lock": address.parts["lock"],
            "repro.commit": code["commit"],
            "repro.dirty": code["dirty"],
            "repro.image": environment["preimage"]["image"],
        },
    )
    return Opened(record, resumed)


def _require_same_address(out: Path, address: ContentAddress) -> None:
    there = read_json(out / names.ADDRESS)["preimage"]
    if differing := differences(there, address.preimage):
        raise Refused(
            f"{out} holds an unfinished run of another content address ({named(differing, 'there', 'here')}). "
            f"Finish that one, remove the folder, or choose another with --out"
        )


def _record_environment(out: Path, environment: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Write down the numeric environment of a resumed run, and tell the user if it is another one than before."""
    earlier = read_json(out / names.ENVIRONMENT)
    if earlier["class"] != environment["class"]:
        differing = named(differences(earlier["preimage"], environment["preimage"]), "there", "here")
        tell(f"{out} goes on in another numeric environment, its bits are not promised. {differing}")
        environment = environment | {"class": f"mixed/{digest([earlier['class'], environment['class']])[:16]}"}
    write_json(out / names.ENVIRONMENT, environment)
