"""The first tensor in which a part of a run, trained again, differs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..base.files import read_json
from ..checkpoint import checkpoint
from ..core.digest import tensor_digest
from ..core.state import VALUES
from ..core.trees import leaves
from ..record.names import CHECKPOINTS, WEIGHTS
from ..record.removal import VALUES as STATE_FILE
from ..trace import tensors

STATE, END = "state", "weights of run.finish()"  # phases, beside those of the trace
KINDS: dict[str, str | tuple[str, ...]] = {  # begin the names of the tensors that a phase of a step makes
    "batch": "batch ",
    "loss": ("output ", "loss"),
    "gradient": "gradient ",
    "weights": "weights ",
}


def digests(out: Path, phase: str, steps: int) -> dict[str, Any]:
    """What a training in `out` has that a phase is made of: tensors by their digests, of a state all else, too.

    Those of a step are kept by `trace.values`; a state is that after so many `steps`. Nothing where it is not there, or
    cannot be read.
    """
    try:
        if phase == STATE:
            return _state(out, steps)
        if phase == END:
            file = safe_open(out / WEIGHTS, "pt")
            return {f"weights {name}": int(tensor_digest(file.get_tensor(name))) for name in file.keys()}  # noqa: SIM118
        return {name: int(tensor_digest(value)) for name, value in tensors.read(out) if name.startswith(KINDS[phase])}
    except Exception:  # whatever it is: the run contradicts itself all the same
        return {}


def _state(out: Path, steps: int) -> dict[str, Any]:
    (path,) = [path for path in checkpoint.found(out / CHECKPOINTS) if checkpoint.steps_of(path) == steps]
    state = read_json(path / STATE_FILE)
    weights, *others = (state["digests"][group] for group in ("model", "optimizer", "others"))
    found = {f"weights {name}": digest for name, digest in weights.items()}
    for each in others:
        found |= each
    return found | {way: value for of in VALUES for way, value in leaves(state[of], of)}


def first(phase: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The name of the first one that differs; empty where none does. A state may lack one that the other has."""
    both = [*one, *other] if one and other and phase == STATE else [name for name in one if name in other]
    return next(iter(tensors.ordered([name for name in both if one.get(name) != other.get(name)], phase)), "")
