"""What a run begins with that starts from another one, by that one's receipt. Loads without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..address.manifest import require_sha256
from ..base.files import read_json
from ..base.forms import Form, Sha256
from ..core.errors import UserError
from . import names
from .classes import environments
from .removal import CHECKPOINT, VALUES, own

if TYPE_CHECKING:
    from ..config.settings import Start
    from .receipt import Receipt

ADDRESSED = "weights", "state"


class State(Form):
    """What state.json of a checkpoint says of itself."""

    step: int
    address: Sha256
    environment: Sha256
    content: Sha256


def requested(source: Path, with_state: bool, out: Path) -> dict[str, str]:
    """The keys of a run in `out` that starts from the run of a receipt, or in a run directory.

    `with_state` takes the optimizer's state and the step of its last checkpoint, too.

    Raises:
        UserError: there is no receipt, or its run lies in `out`; or its last state is not there.
        RunError: the receipt was altered.
    """
    from .receipt import read

    receipt = read(source)
    folder = receipt.path.parent
    if folder.resolve() == out.resolve():
        raise UserError(f"--from {source}: it lies in --out {out} itself; choose another run directory with --out")
    keys = {"run": str(folder), "receipt": receipt.name, "weights": receipt.weights}
    keys["state"] = _last_state(receipt) if with_state else ""
    return {f"start.{name}": value for name, value in keys.items()}


def _last_state(receipt: "Receipt") -> str:
    """The digest of the state after the last step of a run, which its receipt does not state: but whose state it is."""
    folder = receipt.path.parent / names.CHECKPOINTS
    found = sorted(own(folder, CHECKPOINT))
    if not found:
        raise UserError(
            f"{folder}: no checkpoint seen, that run's last one wanted; without --state its weights alone are taken"
        )
    state = read_json(found[-1] / VALUES, State)
    stated = receipt.stated
    wanted = {
        "address": (stated["address"],),
        "environment": environments(stated["environment"]),
        "step": (stated["metrics"].get("steps"),),
    }
    for name, allowed in wanted.items():
        if state[name] not in allowed:
            raise UserError(
                f"{found[-1]}: {name} {state[name]} seen, {allowed[-1]} wanted, as the receipt states: it is no "
                f"checkpoint after that run's last step; without --state its weights alone are taken"
            )
    return str(state["content"])


def require(start: "Start") -> None:
    """Refuse weights that are not those from which the run is to start.

    Raises:
        UserError: they are missing, or other ones.
    """
    if not (start.run or start.addressed):
        return
    if not (start.run and start.weights):
        raise UserError("start.run and start.weights are wanted together: let --from RECEIPT fill in both")
    remedy = "This run starts from these weights: bring them back, or make that run again there"
    require_sha256(Path(start.run) / names.WEIGHTS, start.weights, remedy, check=None)


def begun_with(preimage: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """What keys a config has to hold by the part `start` of an address; of one without it, those that it does hold."""
    start = preimage.get("start", {})
    return {f"start.{name}": start.get(name, "") for name in ADDRESSED if name in start or f"start.{name}" in config}


def words(config: Mapping[str, Any]) -> str:
    """From what a run of this config started, in words; empty where it drew its weights."""
    held = {name: config.get(f"start.{name}") for name in ("run", "receipt", *ADDRESSED)}
    if not held["weights"]:
        return ""
    state = f", with its state {held['state']}" if held["state"] else ""
    return f"{held['run']}: weights {held['weights']} of receipt {held['receipt'] or 'unknown'}{state}"
