"""The library samebits keeps the bits of a training: read it, you need not edit it. It never imports your files.

Import `samebits` alone: the names in `__all__` are public, and each is loaded when it is first used. So a config that
names a `Section` loads no torch. Tests also import `samebits.testing`. Everything else is private, and each room
imports only from rooms below it:

| room | holds |
|---|---|
| cli | the `samebits` command |
| analysis | questions asked of runs and of code: verify, diff, replay, compare, audit, doctor. No run imports it |
| testing | what tests of a project need. No run imports it |
| front | how a stage starts and ends |
| run, stage; finish, folder | what the owner's functions hold; from an open run directory to the receipt |
| prove | parts of a run that are trained again before its receipt is written |
| start; trace, checkpoint, tracking | how processes start; observers of the loop, and the uploader |
| environment; record; guards | what a run runs on; what it writes down; what is refused by name |
| address; config; base | what was requested; its keys; files, git, text. These load without torch |
| core | decides bits: seeds, order, sums, ranks, determinism flags, digests, the loop. Nothing else does |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import loader as loader  # before any other module is imported

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .address.manifest import require_sha256 as require_sha256
    from .base.files import write_json as write_json
    from .checkpoint.final import load_weights as load_weights
    from .config.settings import Data as Data
    from .config.settings import Environment as Environment
    from .config.settings import Neutral as Neutral
    from .config.settings import Section as Section
    from .config.settings import Settings as Settings
    from .core.errors import NonFinite as NonFinite
    from .core.errors import UserError as UserError
    from .core.exact import clip_grad_norm_ as clip_grad_norm_
    from .core.exact import sqrt as sqrt
    from .core.objects import Average as Average
    from .core.objects import Best as Best
    from .core.objects import Patience as Patience
    from .core.order import Permutation as Permutation
    from .core.orders import ByLength as ByLength
    from .core.orders import Weighted as Weighted
    from .core.plan import item_epoch as item_epoch
    from .core.schedules import cosine as cosine
    from .core.step import Step as Step
    from .front import main as main
    from .run import Run as Run
    from .stage import Stage as Stage
    from .stage import evaluating as evaluating
    from .stage import sums as sums

# The public names, by the modules that hold them.
PUBLIC = {
    "address.manifest": ("require_sha256",),
    "base.files": ("write_json",),
    "checkpoint.final": ("load_weights",),
    "config.settings": ("Data", "Environment", "Neutral", "Section", "Settings"),
    "core.errors": ("NonFinite", "UserError"),
    "core.exact": ("clip_grad_norm_", "sqrt"),
    "core.objects": ("Average", "Best", "Patience"),
    "core.order": ("Permutation",),
    "core.orders": ("ByLength", "Weighted"),
    "core.plan": ("item_epoch",),
    "core.schedules": ("cosine",),
    "core.step": ("Step",),
    "front": ("main",),
    "run": ("Run",),
    "stage": ("Stage", "evaluating", "sums"),
}
_HOMES = {name: module for module, names in PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no public name {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
